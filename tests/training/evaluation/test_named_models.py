"""Evaluation of models of other libraries by name, with their own class names, and sweeps on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from vitrail.cli import app
from vitrail.cli._shared.options import parse_sweep, with_present_names
from vitrail.errors import InvalidOption
from vitrail.training import evaluate
from vitrail.training.evaluation.evaluator import rename_classes

CLASSES = ("english springer", "chain saw, chainsaw", "other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of transformers, images of two of its three classes, and a mapping of their names."""
    hf = pytest.importorskip("transformers", reason="needs a model of transformers")
    root = tmp_path_factory.mktemp("named")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.ViTConfig(**sizes, image_size=16, patch_size=4, id2label=dict(enumerate(CLASSES)))
    hf.ViTForImageClassification(config).save_pretrained(root / "model")
    hf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(root / "model")
    for number, name in enumerate(("English_springer", "chainsaw")):
        (root / "val" / name).mkdir(parents=True)
        for image in range(3):
            Image.new("RGB", (16, 16), (80 * image, 200 * number, 90)).save(root / "val" / name / f"{image}.png")
    (root / "map.json").write_text(json.dumps({"chainsaw": "Chain_saw, chainsaw"}))
    return root


def test_a_model_of_transformers_by_name_has_its_own_classes(folder: Path) -> None:
    hf = pytest.importorskip("transformers", reason="needs a model of transformers")
    name = f"hf:{folder / 'model'}"
    found = evaluate(name, folder / "val", class_map=folder / "map.json", device="cpu", seconds=0, look=0)
    model = hf.ViTForImageClassification.from_pretrained(folder / "model").eval()
    processor = hf.ViTImageProcessor.from_pretrained(folder / "model")
    files = sorted((folder / "val").glob("*/*.png"))
    images = processor([Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    truth = torch.tensor([{"English_springer": 0, "chainsaw": 1}[file.parent.name] for file in files])
    logits = model(images).logits
    assert found.count == 6
    assert found.accuracy["fused"] == pytest.approx((logits.argmax(1) == truth).double().mean().item())
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, truth).item(), rel=1e-4)
    with pytest.raises(InvalidOption, match="'chainsaw' is not among the 3 known classes"):
        evaluate(name, folder / "val", device="cpu")


def test_a_sweep_prints_the_unmerged_model_beside_the_others(folder: Path, tmp_path: Path) -> None:
    name, out = f"hf:{folder / 'model'}", tmp_path / "sweep.json"
    options = ["--class-map", folder / "map.json", "--merge", "r=0,1,3", "-o", out, "--device", "cpu"]
    result = CliRunner().invoke(app, ["evaluate", name, *map(str, [folder / "val", *options])])
    assert result.exit_code == 0, result.output
    assert [word in result.stdout for word in ("unmerged", "r=1", "r=3", "r=0")] == [True, True, True, False]
    values = json.loads(out.read_text())
    assert list(values) == ["unmerged", "r=1", "r=3"]
    alone = evaluate(name, folder / "val", class_map=folder / "map.json", merge="r=3", device="cpu", seconds=0)
    assert values["r=3"]["loss"] == pytest.approx(alone.loss, rel=1e-6)


def test_sweeps() -> None:
    assert parse_sweep(None) == {"": None}
    assert parse_sweep("r=8,schedule=decreasing") == {"": "r=8,schedule=decreasing"}
    assert parse_sweep("keep=0.9,0.5,method=tome") == {
        "unmerged": "r=0",
        "keep=0.9": "keep=0.9,method=tome",
        "keep=0.5": "keep=0.5,method=tome",
    }
    for wrong in ("schedule=constant,decreasing", "r=1,2,keep=0.5,0.4"):
        with pytest.raises(typer.BadParameter, match="a sweep has several values of one"):
            parse_sweep(wrong)


def test_class_maps_that_do_not_fit() -> None:
    known = {"label": CLASSES}
    assert rename_classes(known, {"dog": "English springer"}) == {"label": ("dog", *CLASSES[1:])}
    assert rename_classes(known, None) == known
    for wrong, words in (
        ({"dog": "cat"}, "'cat' is no class"),
        ({"dog": 3}, "a JSON object"),
        ({"a": "other", "b": "Other"}, "same class"),
        ("nothing.json", "could not be read"),
    ):
        with pytest.raises(InvalidOption, match=words):
            rename_classes(known, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="has no class names"):
        rename_classes(None, {"a": "b"})


def test_former_names_of_options_still_work() -> None:
    known = {"--image-size", "--batch-size", "-b"}
    given = ["m", "--size", "64", "--batch=8", "-b", "2", "--", "--size"]
    assert with_present_names(given, known) == ["m", "--image-size", "64", "--batch-size=8", *given[4:]]
    assert with_present_names(["--size", "3"], {"--size"}) == ["--size", "3"]
