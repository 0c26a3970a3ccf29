"""Model directories from strangers: no code runs, no memory is taken, and weights that do not fit are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

import vitrail
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.models.weights_file import only_weights
from vitrail.training import load_trained

NAME, SMALL = "vit_tiny_patch16_224", {"img_size": 32, "num_classes": 3, "depth": 1}
HF = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


class Payload:
    """An object whose pickle leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "the pickle ran"


def of_timm() -> Any:
    return timm.create_model(NAME, **SMALL).eval()


def write(folder: Path, config: Any, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, states in files.items():
        file = folder / name.replace("__", ".")
        save_file(states, file) if file.suffix == ".safetensors" else torch.save(states, file)
    return folder


LOCAL = {"architecture": NAME, "num_classes": 3, "pretrained_cfg": {}, "model_args": {"img_size": 32, "depth": 1}}


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained"])
def test_options_of_a_file_are_those_of_the_model(option: str, tmp_path: Path, mark: Path) -> None:
    values = {"checkpoint_path": str(tmp_path / "a" / "w.pth"), "pretrained": True}
    value = values.get(option, {"file": str(tmp_path / "a" / "w.pth")})
    config = {"architecture": f"timm:{NAME}", "options": {**SMALL, option: value}}
    model = of_timm()
    states = model.state_dict()
    folder = write(tmp_path / "a", config, model__safetensors=states, w__pth={"state_dict": states, "x": Payload(mark)})
    with pytest.raises(ModelLoadError, match=option):
        vitrail.load_model(str(folder))
    assert not mark.exists()
    config["options"] = {**SMALL, "drop_path_rate": 0.1, "qkv_bias": True}  # of the class, and of timm
    loaded = vitrail.load_model(str(write(folder, config)))
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in states.items())


@pytest.mark.parametrize("file", ["pytorch_model__bin", "model__pth", "weights__pt"])
def test_a_pickle_beside_a_config_gives_tensors_and_nothing_else(file: str, tmp_path: Path, mark: Path) -> None:
    model = of_timm()
    evil = write(tmp_path / "evil", LOCAL, **{file: {"state_dict": model.state_dict(), "x": Payload(mark)}})
    with pytest.raises(ModelLoadError, match="code in a weights file is never run"):
        vitrail.load_model(f"timm:local-dir:{evil}")
    assert not mark.exists()
    honest = write(tmp_path / "honest", LOCAL, **{file: {"state_dict": model.state_dict()}})
    loaded = vitrail.load_model(f"timm:local-dir:{honest}")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_library_that_unpickles_anything_gets_weights_alone(tmp_path: Path, mark: Path) -> None:
    torch.save(Payload(mark), tmp_path / "x.pt")
    before = dict(os.environ)
    with only_weights(), pytest.raises(Exception, match=r"[Ww]eights.only"), only_weights():
        torch.load(tmp_path / "x.pt", weights_only=False)
    assert not mark.exists()
    assert dict(os.environ) == before


def test_code_in_a_transformers_folder_is_not_run(tmp_path: Path, mark: Path) -> None:
    transformers.ViTModel(transformers.ViTConfig(**HF, intermediate_size=16)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs", "AutoModel": "theirs.Theirs"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text(f"import os; os.mkdir({str(mark)!r})\nclass Theirs: pass\n")
    with pytest.raises(ModelLoadError):
        vitrail.load_model(f"hf:{tmp_path}")
    assert not mark.exists()


def test_transformers_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    transformers.ViTModel(transformers.ViTConfig(**HF, intermediate_size=16)).save_pretrained(tmp_path)
    assert vitrail.load_model(f"hf:{tmp_path}") is not None
    save_file({"other": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="would stay random"):
        vitrail.load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "values", [{"depth": 10**9}, {"depth": 10**30}, {"width": 2**40}, {"image_size": 2**60}, {"num_classes": 10**12}]
)
def test_a_config_that_would_take_all_memory_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    model = vitrail.create_model("vit_tiny_patch16", image_size=16, patch_size=8, width=32, depth=1, heads=2)
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidOption, match=next(iter(values))):
        vitrail.create_model("vit_tiny_patch16", **values)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    for load in (vitrail.load_model, load_trained):
        with pytest.raises((ModelLoadError, InvalidOption), match="expected"):
            load(str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1]", "null", '{"num_hidden_layers": 1000000000}', "\x00", ""])
@pytest.mark.parametrize("prefix", ["", "hf:", "timm:local-dir:", "vitrail:"])
def test_a_damaged_config_is_one_clear_error(text: str, prefix: str, tmp_path: Path) -> None:
    if prefix == "hf:" and "layers" in text:
        text = json.dumps({"model_type": "vit", **HF, "num_hidden_layers": 10**9})
    write(tmp_path, text, model__safetensors={"x": torch.zeros(1)})
    with pytest.raises(ModelLoadError):
        vitrail.load_model(f"{prefix}{tmp_path}")


@pytest.mark.parametrize("labels", ["[]", '{"classes": 3}', '{"classes": {"label": [1, 2]}}', '{"trained": 5}'])
def test_damaged_labels_are_one_clear_error(labels: str, tmp_path: Path) -> None:
    model = vitrail.create_model("vit_tiny_patch16", image_size=16, patch_size=8, width=32, depth=1, heads=2)
    model.save_pretrained(tmp_path)
    (tmp_path / "labels.json").write_text(labels)
    with pytest.raises(ModelLoadError, match=r"labels\.json"):
        load_trained(tmp_path)
