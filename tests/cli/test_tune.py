"""``vitrail tune`` from the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app
from vitrail.cli.tune import _notes
from vitrail.data import samples
from vitrail.tuning import Tuning


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, path in samples().items():
        for turn in range(2):
            Image.open(path).convert("RGB").rotate(180 * turn).resize((64, 64)).save(folder / f"{name}-{turn}.png")
    return folder


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *map(str, args)])
    return result.exit_code, result.output


def test_a_setting_is_found_printed_and_saved(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    options = ["--within", "cosine 0.5", "--seconds", 5, "--batch", 4, "-o", out]
    code, text = run("vitrail:tiny", photos, *options)
    assert code == 0, text
    found = Tuning.load(out)
    assert found.value >= 0.5
    assert f"{found.flops / 1e9:.3g}" in text
    model = vitrail.load_model("vitrail:tiny")
    with found.apply(model) as merging:
        assert merging.flops() == found.flops
    assert json.loads(out.read_text())["quality"] == "cosine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "exactly one"),
        (["--within", "agreement"], "agreement 0.99"),
        (["--within", "cosine 0.9", "--method", "nothing"], "method"),
        (["--within", "cosine 0.9", "--method", "{"], "JSON"),
        (["--within", "accuracy_loss 0.1"], "labels"),
    ],
)
def test_wrong_options_are_errors_without_a_traceback(
    photos: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    code, text = run("vitrail:tiny", photos, *options, "-o", tmp_path / "tune.json")
    assert code == 2
    assert words in " ".join(text.split())
    assert not (tmp_path / "tune.json").exists()


@pytest.mark.parametrize(
    ("interval", "faster", "slower"),
    [((0.38, 0.46), False, True), ((0.9, 1.1), False, False), ((1.2, 1.3), True, False)],
)
def test_a_slower_model_is_called_slower(interval: tuple[float, float], faster: bool, slower: bool) -> None:
    values = {field.name: None for field in fields(Tuning)} | {"value": 1.0, "speedup": 1.0, "interrupted": False}
    found = Tuning(**values | {"speedup_interval": interval})
    assert (found.is_faster, found.is_slower) == (faster, slower)
    assert [("slower" in note, "noise" in note) for note in _notes(found, "images")] == (
        [] if faster else [(slower, not slower)]
    )
