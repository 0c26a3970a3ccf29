"""Saved models by name: embedded models, half-precision weights, class names."""

import copy
import json
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.adapters import saved
from vitrail.errors import ModelLoadError
from vitrail.models import ViT
from vitrail.models.saving import write_folder
from vitrail.training import load_trained

SIZES = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 2}


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    return vitrail.create_model("vit_tiny_patch16", **SIZES).eval()


def save(model: ViT, folder: Path, dtype: torch.dtype) -> Path:
    write_folder(folder, model.config.to_dict(), {name: value.to(dtype) for name, value in model.state_dict().items()})
    (folder / "labels.json").write_text('{"classes": {"label": ["cat", "dog"]}}', encoding="utf-8")
    return folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_become_a_model_in_float32(model: ViT, tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = vitrail.load_model(f"vitrail:{save(model, tmp_path, dtype)}")
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.float32}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype).float())
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(loaded(images), model(images), atol=0.02, rtol=0.02)


def test_longer_weights_stay_as_they_are(model: ViT, tmp_path: Path) -> None:
    assert next(saved.load_saved(save(model, tmp_path, torch.float64)).parameters()).dtype == torch.float64


def test_names_of_classes_come_with_the_model_and_stay_with_it(model: ViT, tmp_path: Path) -> None:
    names = {"label": ("cat", "dog")}
    assert vitrail.class_names(model) == {}
    loaded = vitrail.load_model(str(save(model, tmp_path, torch.float32)))
    assert vitrail.class_names(loaded) == names
    assert vitrail.class_names(torch.nn.Sequential(copy.deepcopy(loaded))) == names
    trained, labels = load_trained(tmp_path)
    assert vitrail.class_names(trained) == labels.classes == names
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_an_embedded_model_is_found_by_its_name_alone(
    model: ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = save(model, tmp_path / "home", torch.float16), tmp_path / "here"
    monkeypatch.setitem(saved.EMBEDDED, "tiny", home)
    for loaded in (vitrail.load_model("vitrail:tiny"), load_trained("vitrail:tiny")[0]):
        assert torch.equal(loaded.state_dict()["norm.weight"], model.state_dict()["norm.weight"])
    assert saved.is_saved("vitrail:tiny")

    # A directory of the same name can still be named.
    other = vitrail.create_model("vit_tiny_patch16", **{**SIZES, "depth": 1})
    here.mkdir()
    monkeypatch.chdir(here)
    save(other, here / "tiny", torch.float32)
    assert len(vitrail.load_model("vitrail:tiny").blocks) == 2
    for name in ("tiny", "./tiny", "vitrail:./tiny", "vitrail:local-dir:tiny"):
        assert len(vitrail.load_model(name).blocks) == 1, name
    assert len(load_trained("tiny")[0].blocks) == 1


def test_a_missing_embedded_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saved.EMBEDDED, "tiny", tmp_path / "none")
    assert not saved.is_saved("vitrail:tiny")
    for load in (vitrail.load_model, load_trained):
        with pytest.raises(
            ModelLoadError, match=r"vitrail:tiny is not part of this installation: .* has no config\.json"
        ):
            load("vitrail:tiny")


def test_the_names_of_classes_are_saved_again(model: ViT, tmp_path: Path) -> None:
    names = {"classes": {"label": ["ä", "b"]}, "trained": {"epochs": 3}}
    save(model, tmp_path / "one", torch.float32)
    (tmp_path / "one" / "labels.json").write_text(json.dumps(names), encoding="utf-8")
    loaded = vitrail.load_model(str(tmp_path / "one"))
    loaded.save_pretrained(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "labels.json").read_text(encoding="utf-8")) == names
    assert vitrail.class_names(vitrail.load_model(str(tmp_path / "two"))) == {"label": ("ä", "b")}
    model.save_pretrained(tmp_path / "three")
    assert not (tmp_path / "three" / "labels.json").exists()
