"""Saving and loading: atomic, bit for bit, with clear errors for other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.mixes import MIXES, SMALL, built
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models import ViT, ViTConfig, create_model
from vitrail.models.saving import load_states


@pytest.fixture
def model() -> ViT:
    return built(MIXES["class+distillation+registers+tasks+mixed"], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_kept(model: ViT, dtype: torch.dtype, tmp_path: Path) -> None:
    model.to(dtype).save_pretrained(tmp_path / "new" / "folder")
    again = ViT.from_pretrained(tmp_path / "new" / "folder")
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    states = again.state_dict()
    for name, value in model.state_dict().items():
        assert states[name].dtype == dtype
        assert torch.equal(states[name], value)


def test_files_are_those_that_the_hub_expects(model: ViT, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architecture"] == "vitrail.ViT"
    assert values["tokens"][0]["name"] == "cls"


def test_a_failure_leaves_the_old_files(model: ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.norm.weight.zero_()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelLoadError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_invalid_directories(model: ViT, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a directory"):
        ViT.from_pretrained(tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        ViT.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace("vitrail.ViT", "ViTModel"))
    with pytest.raises(ModelLoadError, match="not the config of a Vitrail model"):
        ViT.from_pretrained(tmp_path)
    config.write_text(whole.replace('"depth": 2', '"depth": 3'))
    with pytest.raises(ModelLoadError, match=r"missing: blocks\.2\.norm1\.weight"):
        ViT.from_pretrained(tmp_path)
    config.write_text(whole.replace('"depth"', '"deep"'))
    with pytest.raises(InvalidOption, match="no option deep"):
        ViT.from_pretrained(tmp_path)
    config.write_text(whole[:-20])
    with pytest.raises(ModelLoadError, match=r"could not( be)? read"):
        ViT.from_pretrained(tmp_path)
    config.write_text(whole)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"could not( be)? read"):
        ViT.from_pretrained(tmp_path)


def test_create_model_loads_directories(model: ViT, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    name = f"local-dir:{tmp_path}"
    assert torch.equal(create_model(name).norm.weight, model.norm.weight)
    assert create_model(name, num_classes=9).config.num_classes == 9
    with pytest.raises(InvalidOption, match="only num_classes can be changed"):
        create_model(name, depth=3)


def test_the_hub_is_used_if_there_is_no_directory(model: ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(tmp_path / "stored")
    calls = []

    def download(repository: str, file: str, **options: Any) -> str:
        calls.append((repository, file, options))
        return str(shutil.copy(tmp_path / "stored" / file, tmp_path / file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    again = ViT.from_pretrained("hf-hub:owner/name", revision="v1")
    assert torch.equal(again.norm.weight, model.norm.weight)
    assert calls == [("owner/name", file, {"revision": "v1"}) for file in ("config.json", "model.safetensors")]


def test_weights_that_do_not_fit_are_listed() -> None:
    model = ViT(ViTConfig(**SMALL))
    states = {**model.state_dict(), "norm.bias": torch.zeros(3), "stray": torch.zeros(1)}
    del states["tokens.cls"]
    with pytest.raises(ModelLoadError) as caught:
        load_states(model, states)
    for words in ("missing: tokens.cls", "unexpected: stray", "norm.bias is (3,), expected (24,)"):
        assert words in str(caught.value)
    assert "strict" not in str(caught.value)  # the models' own way in has no such option
    del states["norm.bias"]
    load_states(model, states, strict=False)


class FakeHub:
    """A Hub that stores its arguments."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> str:
        taken.update(name=name, private=private, token=self.token, exist_ok=exist_ok)
        return f"https://hub/{name}"

    def upload_folder(self, repo_id: str, folder_path: Path, **options: str) -> None:
        if options.get("commit_message") == "fail":
            raise OSError("no network")
        shutil.copytree(folder_path, taken["to"])
        taken.update(uploaded=repo_id, options=options)


taken: dict[str, Any] = {}


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    taken["to"] = tmp_path / "there"
    model = create_model("vit_tiny_patch16", depth=1, num_classes=3)
    assert model.push_to_hub("me/mine", private=True, token="secret", commit_message="first") == "https://hub/me/mine"
    assert taken["uploaded"] == taken["name"] == "me/mine"
    assert (taken["private"], taken["token"], taken["options"]) == (True, "secret", {"commit_message": "first"})
    again = ViT.from_pretrained(tmp_path / "there")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    with pytest.raises(ModelLoadError, match="owner/name"):
        model.push_to_hub("mine")
    with pytest.raises(ModelLoadError, match="no network"):
        model.push_to_hub("me/mine", commit_message="fail")


@pytest.mark.parametrize("name", ["runs/mistyped", "./mistyped", "~/mistyped-folder"])
def test_a_misspelled_directory_is_not_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("the Hub was contacted"))
    with pytest.raises(ModelLoadError, match="is not a directory"):
        ViT.from_pretrained(name)
