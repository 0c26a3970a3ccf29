"""Configurations: JSON round trip, derived values, and invalid options."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.models.mixes import MIXES, SMALL
from vitrail.errors import InvalidOption
from vitrail.models import MODELS, ViT, ViTConfig, create_model, list_models
from vitrail.models.config import depth_rule
from vitrail.tokens import Role, TokenSpec

CLASS = TokenSpec("cls", Role.CLASS)


@pytest.mark.parametrize("name", [*MODELS, *list(MIXES)[::7]])
def test_json_round_trip(name: str) -> None:
    config = MODELS[name] if name in MODELS else MIXES[name]
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_derived_values() -> None:
    config = ViTConfig(
        image_size=(32, 48), patch_size=(16, 8), width=24, heads=3, mlp_ratio=2.5, depth=3, drop_path=0.2
    )
    assert (config.grid, config.head_width, config.hidden) == ((1, 2, 6), 8, 60)
    assert config.drop_paths == [0.0, 0.1, 0.2]
    assert ViTConfig(depth=3, drop_path=0.2, drop_path_uniform=True).drop_paths == [0.2] * 3
    assert ViTConfig(image_size=(8, 32, 32), patch_size=(2, 16, 16)).grid == (4, 2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 25}, "width=25; expected a multiple of heads=2"),
        ({"depth": 0}, "depth=0; expected an integer from 1"),
        ({"depth": True}, "depth=True"),
        ({"num_classes": -1}, "num_classes=-1"),
        ({"image_size": 17}, "not a whole number of patches"),
        ({"image_size": (16, 16, 16)}, "image_size="),
        ({"patch_size": (2, 4, 4)}, r"image_size=16; expected \(time, height, width\)"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"patch_size": "4"}, "patch_size='4'"),
        ({"position": "absolute"}, "one of learned, sincos, rotary, none"),
        ({"pool": "max"}, "pool='max'"),
        ({"mlp": "relu"}, "mlp='relu'"),
        ({"mlp_ratio": 0.001}, "1/24 or more"),
        ({"mlp": "swiglu", "mlp_ratio": 1.375}, "even"),
        ({"drop_path": 1.0}, "a rate"),
        ({"norm_eps": 0}, "norm_eps=0"),
        ({"layer_scale": 0.0}, "layer_scale=0.0"),
        ({"qk_norm": 1}, "qk_norm=1"),
        ({"position": "rotary", "heads": 12}, "heads of an even width of 4 or more"),
        ({"tokens": CLASS}, "a list of TokenSpec"),
        ({"tokens": ["class"]}, "TokenSpec objects"),
        ({"tokens": [CLASS, CLASS]}, "more than once"),
        ({"tokens": [TokenSpec("cls", Role.CLASS, enters=2)]}, "enters=2; expected 0 to 1"),
        ({"tokens": [TokenSpec("cls", Role.CLASS, enters=-1)]}, "-1 needs class_attention"),
        ({"class_attention": 2}, "needs at least one token"),
        (
            {"tokens": [CLASS, TokenSpec("r", Role.REGISTER, position=True)], "position": "rotary"},
            "'r' has position=True",
        ),
        ({"final_norm": "pooled"}, "needs pool='mean'"),
        (
            {"final_norm": "pooled", "pool": "mean", "tokens": [TokenSpec("t", Role.TASK, classes=2)]},
            "got pool='mean' and t",
        ),
    ],
)
def test_invalid_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        ViTConfig(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": ()}, "pool='token' needs a class token"),
        ({"fuse": "distillation"}, "there is none"),
        ({"tokens": (CLASS, TokenSpec("d", Role.DISTILLATION, classes=3))}, "same number of outputs"),
    ],
)
def test_invalid_heads_are_refused_when_a_model_is_built(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        ViT(ViTConfig(**{**SMALL, **options}))


def test_names() -> None:
    assert list_models("cait_*") == [f"cait_{size}" for size in ("m36", "m48", "s24", "s36", "xs24", "xxs24", "xxs36")]
    assert len(list_models()) == len(MODELS) == 17
    with pytest.raises(InvalidOption, match="no model 'resnet50'; available: cait_m36"):
        create_model("resnet50")
    with pytest.raises(InvalidOption, match="no option classes"):
        create_model("vit_tiny_patch16", classes=3)
    assert list_models("cait") == list_models("cait_*")
    assert list_models("no") == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("deit_tiny_patch16_224", "deit_tiny_patch16"),
        ("deit_small_distilled_patch16_224", "deit_small_patch16_distilled"),
        ("vit_base_patch16_384", "vit_base_patch16"),
        ("cait_xxs24_224", "cait_xxs24"),
    ],
)
def test_names_of_timm_are_understood(theirs: str, ours: str) -> None:
    with pytest.raises(InvalidOption, match=f"did you mean '{ours}'"):
        create_model(theirs)


def test_options_of_timm_are_understood() -> None:
    with pytest.raises(InvalidOption, match="timm's embed_dim is width, timm's img_size is image_size here"):
        create_model("vit_tiny_patch16", img_size=32, embed_dim=24)


def test_invalid_names_and_configs() -> None:
    for name in (None, 3):
        with pytest.raises(InvalidOption, match="expected text"):
            create_model(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="pattern=3"):
        list_models(3)  # type: ignore[arg-type]
    for values in ([1], None, "vit"):
        with pytest.raises(InvalidOption, match="is a dict"):
            ViTConfig.from_dict(values)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="no option 1"):
        ViTConfig.from_dict({1: 2})  # type: ignore[dict-item]


def test_depth_rule() -> None:
    assert [depth_rule(depth) for depth in (12, 18, 19, 24, 25, 48)] == [0.1, 0.1, 1e-5, 1e-5, 1e-6, 1e-6]
    with torch.device("meta"):
        shallow = create_model("cait_xxs24", depth=12)
        chosen = create_model("cait_xxs24", depth=12, layer_scale=0.5)
    assert shallow.config.layer_scale == 0.1
    assert chosen.config.layer_scale == 0.5


@pytest.mark.parametrize("value", [0.25, 1])
def test_initial_layer_scale(value: float) -> None:
    model = create_model("cait_xxs24", depth=2, width=24, heads=2, image_size=16, patch_size=4, layer_scale=value)
    gammas = [value for name, value in model.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 2 * (2 + 2)
    assert all((gamma == value).all() and gamma.requires_grad for gamma in gammas)
