"""Media: which commands accept models of images, audio and video, and what they make of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import vitrail
from tests.cli.words import one_line
from vitrail.cli import app
from vitrail.cli._shared.media import MEDIA, find_readable, medium_of
from vitrail.data import Arrays, open_dataset
from vitrail.errors import ImageError
from vitrail.models import create_model

MODELS: dict[str, dict[str, Any]] = {
    "audio": {"in_chans": 1, "image_size": (16, 24), "patch_size": 8},
    "video": {"image_size": (4, 16, 16), "patch_size": (2, 8, 8)},
}
SHAPES = {"audio": (1, 16, 24), "video": (3, 4, 16, 16)}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A modality, and the directory of a model of it with random weights."""
    sizes = {"width": 16, "depth": 2, "heads": 1, "num_classes": 3}
    create_model("vit_tiny_patch16", **sizes, **MODELS[request.param]).save_pretrained(tmp_path / "model")
    return request.param, tmp_path / "model"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_specification_names_the_modality(saved: tuple[str, Path]) -> None:
    modality, folder = saved
    spec = vitrail.adapters.input_spec(vitrail.load_model(str(folder)))
    assert (spec.modality, spec.shape) == (modality, SHAPES[modality])


def test_bench_times_inputs_of_the_right_shape(saved: tuple[str, Path]) -> None:
    modality, folder = saved
    result = run(
        "bench", f"vitrail:{folder}", "--r", 1, "-b", 2, "--device", "cpu", "--seconds", "0.01", "--pretrained"
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    assert tuple(data["size"]) == SHAPES[modality][1:]
    with vitrail.merge(vitrail.load_model(str(folder)), r=1) as merging:
        assert data["tokens_per_layer"] == merging.tokens_per_layer()
        assert data["flops_after"] == merging.flops()
    assert f"{' × '.join(map(str, SHAPES[modality][1:]))}, batch 2" in result.stdout


def test_export_writes_a_program_for_the_right_shape(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    out = tmp_path / "model.pt2"
    result = run("export", f"vitrail:{folder}", "--r", 1, "--batch", 2, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"images 2 × {' × '.join(map(str, SHAPES[modality]))}" in result.stdout
    inputs = torch.randn(2, *SHAPES[modality])
    model = vitrail.load_model(str(folder))
    vitrail.merge(model, r=1)
    with torch.no_grad():
        assert torch.allclose(torch.export.load(out).module()(inputs), model(inputs), atol=1e-4)


@pytest.mark.parametrize("command", ["merge", "inspect"])
def test_commands_that_read_files_refuse_other_media(saved: tuple[str, Path], command: str, tmp_path: Path) -> None:
    modality, folder = saved
    options = ("-r", 1) if command == "merge" else ()
    samples = Path(vitrail.__file__).parent / "data" / "samples" / "chelsea.jpg"
    result = run(command, f"vitrail:{folder}", samples, *options, "--device", "cpu", "-o", tmp_path / "out.html")
    assert result.exit_code == 2
    text = one_line(result.stderr)
    assert f"takes {MEDIA[modality].noun}" in text
    assert re.search(rf"vitrail {command} is for models that take images\b", text)
    assert not (tmp_path / "out.html").exists()


def test_medium_of_a_dataset() -> None:
    assert medium_of(open_dataset()) is MEDIA["image"]
    for shape in SHAPES.values():
        arrays = open_dataset(Arrays(torch.randn(2, *shape)))
        assert medium_of(arrays) is MEDIA["array"]
        assert find_readable(arrays) == ([0, 1], [])
        batch = MEDIA["array"].batch(arrays.read(0).image, arrays.statistics())
        assert batch.shape == (1, *shape)


def test_nothing_readable(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    with pytest.raises(ImageError, match="none of the 2 images could be read"):
        find_readable(open_dataset(tmp_path))
