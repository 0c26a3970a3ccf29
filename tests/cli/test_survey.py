"""``vitrail survey``: checkpoints of a run, a table and a page, and models that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail.cli import app
from vitrail.cli.survey import checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints and a last model."""
    model = vitrail.create_model("vit_tiny_patch16", image_size=32, patch_size=8, depth=2, width=16, heads=1)
    for place in ("checkpoints/step-00000002", "checkpoints/step-00000010", "last"):
        model.save_pretrained(tmp_path / "run" / place)
    return tmp_path / "run"


def test_checkpoints_of_a_run_by_step(run: Path) -> None:
    names = [f"vitrail:{run / place}" for place in ("checkpoints/step-00000002", "checkpoints/step-00000010", "last")]
    assert checkpoints(str(run)) == checkpoints(f"vitrail:{run}") == names
    assert checkpoints("timm:vit_tiny_patch16_224") == ["timm:vit_tiny_patch16_224"]


def test_page_and_values_of_a_run_and_of_a_model_that_fails(run: Path, tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (32, 32), (90 * number, 10, 200)).save(tmp_path / f"{number}.png")
    out = tmp_path / "survey.html"
    images = [part for number in range(3) for part in ("--data", str(tmp_path / f"{number}.png"))]
    result = CliRunner().invoke(app, ["survey", str(run), "vitrail:nothing", *images, "-o", str(out)])
    assert result.exit_code == 1, result.output
    values = json.loads(out.with_suffix(".json").read_text())
    assert [entry["name"].rsplit("/", 1)[-1] for entry in values["entries"]] == [
        "step-00000002",
        "step-00000010",
        "last",
        "vitrail:nothing",
    ]
    assert [entry["norms"] is None for entry in values["entries"]] == [False, False, False, True]
    assert values["verdict"] == "None of 3 models has artifact tokens."
    page = out.read_text()
    assert "could not have been seen" in page
    assert "3 images" in page
    assert "vitrail:nothing" in result.stderr
