"""``vitrail export``: output, files and errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import vitrail
from tests.cli.words import one_line
from vitrail.adapters import input_spec
from vitrail.adapters.registry import named_classes
from vitrail.cli import app
from vitrail.data import to_tensor
from vitrail.export import export
from vitrail.export.formats import METADATA
from vitrail.export.script import write_script

MODEL = "timm:vit_tiny_patch16_224"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def saved(saved_vit: Path) -> str:
    return f"hf:{saved_vit}"


def test_onnx(saved: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="exporting to ONNX needs it")
    runtime = pytest.importorskip("onnxruntime", reason="what was exported runs in it")
    path = tmp_path / "model.onnx"
    result = run(saved, "--r", "3", "--opset", "21", "-o", path)
    assert result.exit_code == 0, result.output
    assert "as ONNX, opset 21, float32, 0." in result.stdout
    assert "images batch × 3 × 32 × 32" in result.stdout
    assert "logits batch × 5" in result.stdout
    assert "14 11 leave the blocks of the exported model (unmerged: 17)" in result.stdout
    for batch in (1, 3):
        assert re.search(rf"batch {batch}: largest error \S+, relative \S+ \(allowed: 0\.0001\)", result.stdout)
    script = tmp_path / "model.onnx.py"
    assert result.stdout.endswith(f"Written: {path}, {script}\nUse it without Vitrail: python {script} cat.jpg\n")
    check_script(script, model=vitrail.merge(vitrail.load_model(saved), r=3).model, folder=tmp_path)

    model = vitrail.load_model(saved)
    vitrail.merge(model, r=3)
    images = torch.randn(2, 3, 32, 32)
    (logits,) = runtime.InferenceSession(path).run(["logits"], {"images": images.numpy()})
    assert torch.allclose(torch.from_numpy(logits), model(images).logits, atol=1e-4)


def check_script(script: Path, model: torch.nn.Module, folder: Path) -> None:
    """Run a script in an interpreter without torch and Vitrail; compare its scores with the model's."""
    image = Image.effect_noise((50, 41), 90).convert("RGB")
    image.save(folder / "noise.png")
    barrier = "import sys, runpy; sys.modules.update(torch=None, vitrail=None); sys.argv = sys.argv[1:]"
    command = [sys.executable, "-c", f"{barrier}; runpy.run_path(sys.argv[0])", script, folder / "noise.png"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    path, name, shape, *best = shown.rstrip("\n").split("\t")
    assert (path, name, shape, len(best)) == (str(folder / "noise.png"), "logits", "(5,)", 5)
    with torch.no_grad():
        logits = model(to_tensor([image], input_spec(model))).logits[0]
    names = named_classes(model, 5)
    scores = logits.softmax(0) if names else logits
    keys = names or [str(index) for index in range(5)]
    wanted = {keys[index]: scores[index].item() for index in scores.argsort(descending=True).tolist()}
    found = {key: float(value) for key, _, value in (one.rpartition(": ") for one in best)}
    assert list(found) == list(wanted)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_script_names_classes_and_overwrites_nothing_else(saved: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting to ONNX needs it")
    pytest.importorskip("onnxruntime", reason="what was exported runs in it")
    model = vitrail.load_model(saved)
    model.config.id2label = dict(enumerate(("ant", "bee", "cat", "dog", "eel: long")))
    vitrail.merge(model, r=3)
    result = export(model, tmp_path / "model.onnx", batch=2)
    script = write_script(result)
    assert script == tmp_path / "model.onnx.py"
    check_script(script, model, tmp_path)
    assert write_script(result) == script
    script.write_text("mine")
    assert write_script(result) is None
    assert script.read_text() == "mine"
    assert write_script(replace(result, format="pt2")) is None


def test_pt2_options(saved: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    flags = ("--format", "pt2", "--schedule", "decreasing", "--order", "original", "--no-proportional")
    result = run(saved, "--keep", "0.5", *flags, "--batch", "2", "--dtype", "bf16", "--random-weights", "-o", path)
    assert result.exit_code == 0, result.output
    assert "torch.export program, bfloat16" in result.stdout
    assert "images 2 × 3 × 32 × 32" in result.stdout
    assert "random weights" in result.stderr
    extra = {METADATA: ""}
    program = torch.export.load(path, extra_files=extra)
    assert program.module()(torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16)).shape == (2, 5)
    notes = json.loads(extra[METADATA])
    assert notes["tokens"] == [9, 9]
    options = {"schedule": "decreasing", "order": "original", "proportional": False}
    assert notes["merging"] == vitrail.merge(vitrail.load_model(saved), keep=0.5, **options).config


def test_help() -> None:
    text = CliRunner().invoke(app, ["export", "-h"]).stdout
    assert "Examples" in text
    assert "--opset" in text


INVALID = {
    "no file": ((MODEL, "--r", "1"), "Missing option '-o' / '--out'"),
    "nothing to merge by": ((MODEL, "-o", "a.onnx"), "one of -r, --keep, --gflops and --merge"),
    "r and keep": ((MODEL, "--r", "1", "--keep", "0.5", "-o", "a.onnx"), "one of -r, --keep, --gflops and --merge"),
    "negative r": ((MODEL, "--r", "-1", "-o", "a.onnx"), "'-1' is not a number of tokens"),
    "unknown format": ((MODEL, "--r", "1", "--format", "tflite", "-o", "a.onnx"), "'onnx' or 'pt2'; got 'tflite'"),
    "unknown ending": (
        (MODEL, "--r", "1", "-o", "a.tflite"),
        "a.tflite: expected a file name that ends in .onnx or .pt2",
    ),
    "another ending": ((MODEL, "--r", "1", "--format", "onnx", "-o", "a.pt2"), "a.pt2: expected a file name that ends"),
    "no folder": ((MODEL, "--r", "1", "-o", "no/a.pt2"), "no file can be written there"),
    "folder of the system": ((MODEL, "--r", "1", "-o", "/proc/a.pt2"), "/proc/a.pt2"),
    "batch of none": ((MODEL, "--r", "1", "--batch", "0", "-o", "a.pt2"), "'0' is not a batch size"),
    "batch is a word": ((MODEL, "--r", "1", "--batch", "many", "-o", "a.pt2"), "'many' is not a batch size"),
    "unknown precision": ((MODEL, "--r", "1", "--dtype", "fp4", "-o", "a.pt2"), "'fp4' is not one of"),
    "opset of another format": ((MODEL, "--r", "1", "--opset", "20", "-o", "a.pt2"), "leave it out"),
    "unknown model": (("timm:no_such_model", "--r", "1", "-o", "a.pt2"), "no_such_model"),
    "unknown order": (
        (MODEL, "--r", "1", "--order", "odd", "--random-weights", "-o", "a.pt2"),
        "'odd' is not one of 'paper', 'original'",
    ),
    "size is not whole patches": (
        (MODEL, "--r", "1", "--size", "100", "--random-weights", "-o", "a.pt2"),
        "size 100x100 is not a whole number of patches",
    ),
    "another size": (
        ("SAVED", "--r", "1", "--size", "64", "-o", "a.pt2"),
        "fails for an input of shape (2, 3, 64, 64)",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_errors(case: str, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = INVALID[case]
    result = run(*(saved if text == "SAVED" else text for text in arguments))
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert expected in one_line(result.stderr)
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())
