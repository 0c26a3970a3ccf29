"""docs/training.md is correct: its commands and its Python run in order, at a reduced size."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app
from vitrail.models import MODELS
from vitrail.training.config.presets import PRESETS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a directory with images of two colors, and presets and models that take seconds."""
    monkeypatch.chdir(tmp_path)
    pixels, rows = np.random.default_rng(0), ["path,breed,age,tags,mask"]
    for number in range(32):
        kind = ("cat", "dog")[number % 2]
        image = pixels.integers(0, 90, (40, 48, 3), dtype=np.uint8)
        image[..., number % 2] += 120
        (tmp_path / "photos" / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / kind / f"{number:02d}.jpg")
        (tmp_path / "masks" / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[..., 0] > 90).astype(np.uint8)).save(tmp_path / "masks" / kind / f"{number:02d}.png")
        rows.append(f"photos/{kind}/{number:02d}.jpg,{kind},{number / 4},{kind};pet,masks/{kind}/{number:02d}.png")
    (tmp_path / "pets.csv").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setitem(PRESETS, "tiny", {**PRESETS["tiny"], "epochs": 2, "image_size": 32, "batch_size": 16})
    shrunk = replace(MODELS["vit_tiny_patch16"], width=32, heads=2, depth=2)
    monkeypatch.setitem(MODELS, "vit_tiny_patch16", shrunk)
    return tmp_path


def test_every_command_runs(small: Path) -> None:
    assert len(COMMANDS) == 15
    for line in COMMANDS:
        name, *arguments = shlex.split(line)
        assert name == "vitrail"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert (small / "runs/student/last/labels.json").is_file()
    assert (small / "merged.json").is_file()
    assert (small / "report.html").stat().st_size > 10_000
    assert len(list((small / "glass").glob("*.png"))) >= 16
    assert (small / "student.onnx").is_file()
    assert (small / "runs/dtem/last/method.safetensors").is_file()


def test_the_python_runs(small: Path) -> None:
    names: dict[str, object] = {}
    exec(compile("\n".join(PYTHON), "docs/training.md", "exec"), names)
    assert names["labels"].classes == {"label": ("cat", "dog")}  # type: ignore[attr-defined]
    assert set(names["run"].evaluation.accuracy) == {"fused", "cls"}  # type: ignore[attr-defined]
    assert vitrail.Merging.of(names["model"]).method.name == "dtem"  # type: ignore[arg-type]


def test_runs_of_other_libraries_have_the_same_names(small: Path) -> None:
    """A timm model that was trained here is loaded, inspected and named as our models are."""
    import vitrail
    from vitrail.training import evaluate, load_trained, train

    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}
    train(data="photos", model="timm:vit_tiny_patch16_224", options=options, preset="tiny", epochs=1, out="runs/timm")
    trained, labels = load_trained("runs/timm")
    for name in ("vitrail:runs/timm", "runs/timm", "vitrail:runs/timm/last"):
        model = vitrail.load_model(name)
        assert type(model) is type(trained)
        assert vitrail.merge(model, r=1).is_active
    first, second = (evaluate(name, "photos", seconds=0) for name in ("vitrail:runs/timm", "runs/timm"))
    assert first.accuracy == second.accuracy
    found = evaluate("runs/timm/last", "photos", look=0, seconds=0)
    assert found.notes[0] == f"evaluated: {Path('runs/timm/last')}"
    assert labels.classes == {"label": ("cat", "dog")}
    result = CliRunner().invoke(app, ["train", "--data", "photos", "--teacher", "runs/none", "--preset", "tiny"])
    assert result.exit_code != 0
    assert "no such directory" in " ".join(result.output.split())
