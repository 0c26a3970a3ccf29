"""transformers: input specifications, and models built for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import vitrail
from vitrail.adapters import ModelRequest, find, input_spec
from vitrail.adapters.registry import library
from vitrail.data.spec import MEAN, STD
from vitrail.errors import ModelLoadError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
KINDS: dict[str, type[hf.PreTrainedModel]] = {"vit": hf.ViTForImageClassification, "dinov2": hf.Dinov2Model}
OWN = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


def saved(kind: str, folder: Path, preprocessor: Any = None) -> Path:
    """A small model in a directory, maybe with a ``preprocessor_config.json``."""
    model_class = KINDS[kind]
    options = {**SMALL, "intermediate_size": 16} if kind == "vit" else SMALL
    model_class(model_class.config_class(**options)).save_pretrained(folder)
    if preprocessor is not None:
        text = preprocessor if isinstance(preprocessor, str) else json.dumps(preprocessor)
        (folder / "preprocessor_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_normalization_is_that_of_the_preprocessor(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path, OWN)
    for model in (vitrail.load_model(f"hf:{folder}"), KINDS[kind].from_pretrained(folder)):
        spec = input_spec(model)
        assert (spec.mean, spec.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert spec.size == (32, 32)
        assert spec.argument == "pixel_values"


@pytest.mark.parametrize(
    "text", [None, "{", "[1]", {}, {"image_mean": "no", "image_std": [0, 0, 0]}, {"image_mean": [1]}]
)
def test_without_a_readable_preprocessor_config_the_family_default_applies(text: Any, tmp_path: Path) -> None:
    vit, dinov2 = (input_spec(vitrail.load_model(f"hf:{saved(kind, tmp_path / kind, text)}")) for kind in KINDS)
    assert (vit.mean, vit.std) == ((0.5,) * 3, (0.5,) * 3)
    assert (dinov2.mean, dinov2.std) == (MEAN, STD)


def test_a_preprocessor_that_does_not_normalize(tmp_path: Path) -> None:
    spec = input_spec(vitrail.load_model(f"hf:{saved('vit', tmp_path, {**OWN, 'do_normalize': False})}"))
    assert (spec.mean, spec.std) == ((0.0,) * 3, (1.0,) * 3)


SIZES = {
    "crop": (
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 16, "width": 24}, "do_center_crop": True},
        (16, 24),
    ),
    "no crop": ({"size": {"height": 48, "width": 40}, "crop_size": 16, "do_center_crop": False}, (48, 40)),
    "edge": ({"size": {"shortest_edge": 64}}, (64, 64)),
    "number": ({"size": 24}, (24, 24)),
    "none": ({}, (32, 32)),
    "odd": ({"size": {"longest_edge": 64}}, (32, 32)),
}


@pytest.mark.parametrize("case", SIZES)
def test_size_is_what_the_preprocessor_makes(case: str, tmp_path: Path) -> None:
    """DINOv2 takes any size; ViT needs ``interpolate_pos_encoding`` for other sizes, so its own size is used."""
    preprocessor, expected = SIZES[case]
    dinov2 = vitrail.load_model(f"hf:{saved('dinov2', tmp_path / 'dinov2', preprocessor)}")
    assert input_spec(dinov2).size == expected
    found = find(dinov2)
    assert found.adapter.layout(found.trunk).grid == (1, expected[0] // 8, expected[1] // 8)
    assert input_spec(vitrail.load_model(f"hf:{saved('vit', tmp_path / 'vit', preprocessor)}")).size == (32, 32)


def test_models_without_a_directory(tmp_path: Path) -> None:
    model = hf.Dinov2Model(hf.Dinov2Config(**SMALL))
    assert input_spec(model).mean == MEAN
    model.name_or_path = "nobody/never-cached"
    assert input_spec(model).mean == MEAN
    model.name_or_path = str(saved("dinov2", tmp_path, OWN))
    assert input_spec(model).mean == (0.1, 0.2, 0.3)


def test_training_builds_and_rebuilds_heads(tmp_path: Path) -> None:
    one, folder = library("hf"), saved("vit", tmp_path / "source")
    model, config = one.build(str(folder), ModelRequest({"label": ("a", "b", "c")}))
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert config == {"architecture": "hf"}
    one.save(tmp_path / "run", model, model.state_dict(), config, {"classes": {"label": ["a", "b", "c"]}})
    loaded = vitrail.load_model(str(tmp_path / "run"))
    assert vitrail.class_names(loaded) == {"label": ("a", "b", "c")}
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images).logits, model.eval()(images).logits)
    again, _ = one.rebuild(loaded, tmp_path / "run", config, ModelRequest({"label": ("x",)}), keep_heads=False)
    assert again(images).logits.shape == (2, 1)
    assert torch.equal(again.vit.layernorm.weight, loaded.vit.layernorm.weight)
    with pytest.raises(ModelLoadError, match="could not build"):
        one.build(str(tmp_path), ModelRequest({"label": ("x",)}))
