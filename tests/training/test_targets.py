"""Training on values, several classes at once, and masks: learned, saved, evaluated, merged, resumed, fine-tuned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail
from tests.training.toys import FIELDS, same, weights
from vitrail.cli import app
from vitrail.data import Arrays, open_dataset
from vitrail.data.labels.targets import TargetSpec
from vitrail.embedding import Predictor
from vitrail.errors import InvalidOption, VitrailError
from vitrail.models import create_model
from vitrail.training import evaluate, load_trained, train
from vitrail.training.objective.targets import assign_targets

FIELD: dict[str, Any] = FIELDS | {
    "tokens": None, "epochs": 40, "evaluate_every": 40, "smoothing": 0.0, "batch_size": 8, "lr": 1e-3,
    "augment": "none", "patch_size": 8, "mixup": 0.0, "cutmix": 0.0,
    "options": {"width": 32, "depth": 1, "heads": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a bright square on the left or right: a label file with its brightness, its tags, and a mask."""
    root, draw = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    lines = ["path,side,bright,tags,mask"]
    for number in range(32):
        pixels, mask = draw.integers(0, 40, (32, 32, 3), dtype=np.uint8), np.zeros((32, 32), dtype=np.uint8)
        right, value = number % 2, int(draw.integers(120, 255))
        where = np.s_[8:24, 16:32] if right else np.s_[8:24, 0:16]
        pixels[where], mask[where] = value, 1
        Image.fromarray(pixels).save(root / f"{number}.png")
        Image.fromarray(mask * 255).save(root / f"{number}-mask.png")
        tags = ";".join(["right" if right else "left", *(["light"] if value > 190 else [])])
        lines.append(f"{number}.png,{'right' if right else 'left'},{value}.0,{tags},{number}-mask.png")
    (root / "squares.csv").write_text("\n".join(lines), encoding="utf-8")
    return root / "squares.csv"


def test_values(squares: Path, tmp_path: Path) -> None:
    run = train(**FIELD | {"data": str(squares), "out": str(tmp_path / "run"), "labels": "bright", "validation": 0.25})
    assert run.evaluation.r2["fused"] == run.evaluation.score
    model, labels = load_trained(run.folder / "last")
    target = labels.targets["bright"]
    assert target.kind == "regression"
    found = evaluate(run.last, squares, seconds=0, look=0)
    assert found.r2["fused"] > 0.8
    dataset = open_dataset(squares, labels="bright", labeled=True)
    (batch,) = dataset.batches(labels.preprocessing, 32)
    with torch.no_grad():  # by hand, in the units of the labels
        values = target.mean + target.std * model(batch.images)[:, 0]
    errors = values - dataset.labels[:, 0]
    assert found.rmse["fused"] == pytest.approx(errors.square().mean().sqrt().item(), rel=1e-4)
    assert found.mae["fused"] == pytest.approx(errors.abs().mean().item(), rel=1e-4)
    assert "fused RMSE" in found.headlines[0]
    assert evaluate(run.last, squares, seconds=0, look=0, merge={"r": 0}).rmse == pytest.approx(found.rmse, rel=1e-4)


def test_several_classes_at_once(squares: Path, tmp_path: Path) -> None:
    fields = {"labels": "tags", "kind": "multilabel", "validation": 0.25}
    run = train(**FIELD | fields | {"data": str(squares), "out": str(tmp_path / "run")})
    found = evaluate(run.last, squares, seconds=0, look=0)
    assert found.classes == {"fused": ("left", "light", "right")}
    assert found.mean_ap["fused"] > 0.9
    assert len(found.ap["fused"]) == 3


@pytest.mark.parametrize("head", ["linear", "decoder"])
def test_masks(squares: Path, tmp_path: Path, head: str) -> None:
    options = {**FIELD["options"], "dense_head": head}
    fields = {"kind": "dense", "validation": 0.25, "augment": "flip", "options": options, "mixup": None}
    run = train(**FIELD | fields | {"data": str(squares), "out": str(tmp_path / "run")})
    found = evaluate(run.last, squares, seconds=0, look=0)
    assert found.miou["fused"] > 0.8
    model, labels = load_trained(run.last)
    assert labels.classes == {"mask": ("background", "foreground")}
    (batch,) = open_dataset(squares).batches(labels.preprocessing, 32)
    with torch.no_grad():
        predicted = model(batch.images).dense.argmax(1)
    both, either = ((predicted == 1) & (batch.masks == 1)).sum(), ((predicted == 1) | (batch.masks == 1)).sum()
    assert found.iou["fused"][1] == pytest.approx((both / either).item(), abs=1e-4)
    with vitrail.merge(model, r=2), torch.no_grad():
        assert model(batch.images).dense.shape == (32, 2, 32, 32)
    assert evaluate(run.last, squares, seconds=0, look=0, merge={"r": 2}).miou["fused"] > 0.5


def test_depth_maps(squares: Path, tmp_path: Path) -> None:
    """Depths of millimeters in 16 bits or in arrays, the bright square being near; every fourth row is unknown."""
    for folder in ("images", "png", "npy"):
        (tmp_path / folder).mkdir()
    for number in range(32):
        pixels = Image.open(squares.parent / f"{number}.png")
        pixels.save(tmp_path / f"images/{number}.png")
        depths = np.where(np.asarray(pixels)[..., 0] > 100, 1000, 3000).astype(np.uint16)
        depths[::4] = 0
        Image.fromarray(depths).save(tmp_path / f"png/{number}.png")
        np.save(tmp_path / f"npy/{number}.npy", depths.astype(np.float64))
    fields = {"kind": "depth", "validation": "none", "augment": "strong", "mixup": None, "crop_min": 0.5}
    data = {"data": str(tmp_path / "images"), "masks": str(tmp_path / "png"), "out": str(tmp_path / "run")}
    run = train(**FIELD | fields | data)
    given: dict[str, Any] = {"masks": tmp_path / "npy", "seconds": 0, "look": 0}
    found = evaluate(run.last, tmp_path / "images", **given)
    assert found.count == 32
    assert found.score == found.r2["fused"] > 0.7
    model, labels = load_trained(run.last)
    target = labels.targets["depth"]
    assert 2000 < target.mean < 3000
    dataset = open_dataset(tmp_path / "images", kind="depth", masks=tmp_path / "npy")
    (batch,) = dataset.batches(labels.preprocessing, 32)
    with torch.no_grad():  # by hand, in the units of the depths
        errors = target.mean + target.std * model(batch.images).dense[:, 0] - batch.masks
    assert batch.masks.isnan().float().mean() == 0.25
    assert found.rmse["fused"] == pytest.approx(errors[~errors.isnan()].square().mean().sqrt().item(), rel=1e-4)
    assert evaluate(run.last, tmp_path / "images", **given, merge={"r": 2}).r2["fused"] > 0.5


def test_tasks_of_every_kind_resume_and_are_fine_tuned(squares: Path, tmp_path: Path) -> None:
    fields = FIELD | {"data": str(squares), "tasks": "side,bright,tags,mask", "kind": "tags=multilabel", "epochs": 2}
    run = train(**fields, out=str(tmp_path / "run"), save_every="2 steps", keep=9)
    model, labels = load_trained(run.last)
    assert {name: target.kind for name, target in labels.targets.items()} == {
        "bright": "regression", "tags": "multilabel", "mask": "dense",
    }  # fmt: skip
    assert {spec.name: (spec.classes, spec.kind) for spec in model.config.tokens} == {
        "side": (2, "classification"), "bright": (1, "regression"), "tags": (3, "classification"),
    }  # fmt: skip
    found = evaluate(run.last, squares, seconds=0)
    assert found.accuracy.keys() == {"task.side", "task.tags", "task.mask"}
    assert found.r2.keys() == {"task.bright"}
    assert found.to_dict()["miou"].keys() == {"task.mask"}
    (batch,) = open_dataset(squares).batches(labels.preprocessing, 32)
    predictor = Predictor(model)
    predicted = predictor.finish(predictor.run(batch.images))
    assert predicted.keys() == {column.name for column in predictor.columns}
    with torch.no_grad():
        outputs = model(batch.images).by_role
    target = labels.targets["bright"]
    assert predicted["bright.value"] == pytest.approx((target.mean + target.std * outputs["bright"][:, 0]).numpy())
    assert predicted["tags.probability_1"] == pytest.approx(outputs["tags"].sigmoid().amax(1).numpy())
    one = evaluate(run.last, squares, labels=("bright",), seconds=0, look=0)
    assert one.rmse["task.bright"] == pytest.approx(found.rmse["task.bright"])
    dataset = open_dataset(squares, labels=("side", "bright", "tags", "mask"), kind={"tags": "multilabel"})
    tuned = train(**fields | {"data": dataset, "model": str(run.last), "epochs": 1, "lr": 1e-9, "kind": None,
                              "image_size": None, "patch_size": None, "options": {}},
                  out=str(tmp_path / "tuned"))  # fmt: skip
    assert load_trained(tuned.last)[1].targets == labels.targets
    assert evaluate(tuned.last, squares, seconds=0, look=0).rmse == pytest.approx(found.rmse, rel=1e-3)
    again = train(**fields, out=str(tmp_path / "again"), save_every="2 steps", keep=9)
    assert same(weights(again.last), weights(run.last))


def test_values_of_sounds(tmp_path: Path) -> None:
    values = torch.randn(24, 1, 16, 24)
    data = Arrays(values, {"loud": values.mean((1, 2, 3)).tolist()})
    fields = {name: value for name, value in FIELD.items() if name != "image_size"}
    run = train(**fields | {"data": data, "labels": "loud", "epochs": 2, "out": str(tmp_path / "run")})
    assert evaluate(run.last, data, labels=("loud",), seconds=0, look=0).rmse.keys() == {"fused", "cls"}


def test_commands(squares: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    common = ("--preset", "tiny", "--image-size", 32, "--patch-size", 8, "--epochs", 1, "--batch-size", 8)
    common += ("--options", "{width: 32, depth: 1, heads: 2}", "--device", "cpu")
    text = run("train", "--data", squares, "--tasks", "bright,mask", *common, "-o", tmp_path / "run")
    assert "task.bright RMSE" in text
    assert "task.mask mIoU" in text
    text = run("evaluate", tmp_path / "run" / "last", squares, "--device", "cpu", "-o", tmp_path / "found.json")
    assert all(word in text for word in ("RMSE", "MAE", "R²", "task.mask: mIoU", "background", "foreground"))
    text = run("merge", f"vitrail:{tmp_path / 'run' / 'last'}", squares, "-r", 1, "--device", "cpu", "--limit", 1,
               "-o", tmp_path / "glass")  # fmt: skip
    assert "0.png" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "dense", "cutmix": 1.0}, "cutmix=1.0 mixes images"),
        ({"kind": "dense", "model": "timm:vit_tiny_patch16_224", "image_size": None, "patch_size": None, "options": {}},
         "need a Vitrail model"),
        ({"kind": "height"}, "kind='height': expected one of classification"),
        ({"labels": "age"}, "no such label column"),
        ({"labels": "side", "kind": "regression"}, "side is 'left'; expected a finite number"),
        ({"labels": "bright", "teacher": "vitrail:tiny", "distillation": "hard"}, "learns classes from a teacher"),
        ({"kind": "dense", "mask_classes": "one"}, "mask_classes=.*two or more different names"),
        ({"masks": "/no/such/folder", "labels": "side"}, "is a table; name masks in a column"),
    ],
)  # fmt: skip
def test_contradictions(squares: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        train(**FIELD | {"data": str(squares), "out": str(tmp_path / "run")} | fields)
    assert not (tmp_path / "run").exists()


def test_other_libraries_learn_values(squares: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    fields = {"model": "timm:test_vit", "pretrained": False, "labels": "bright", "epochs": 1, "options": {}}
    fields |= {"patch_size": None, "image_size": 32}
    run = train(**FIELD | fields | {"data": str(squares), "out": str(tmp_path / "run")})
    assert load_trained(run.last)[0].num_classes == 1
    assert evaluate(run.last, squares, seconds=0, look=0).rmse.keys() == {"fused", "class"}


def test_values_named_as_classes_are_refused(squares: Path) -> None:
    with pytest.raises(InvalidOption, match="kind='regression'"):
        open_dataset(squares, labels="bright", kind="classification")


def test_a_model_has_pixels_of_one_target() -> None:
    model = create_model("vit_tiny_patch16", width=16, depth=1, heads=1, image_size=32, num_classes=0, dense=3)
    classes = {"mask": ("off", "on"), "depth": ("depth",)}
    specs = {"mask": TargetSpec("dense"), "depth": TargetSpec("depth")}
    with pytest.raises(InvalidOption, match=r"mask and depth .* one dense head"):
        assign_targets(model, classes, specs)
