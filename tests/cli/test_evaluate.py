"""``vitrail evaluate``: the table of a sweep."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from vitrail import training
from vitrail.cli import app
from vitrail.training import Evaluation


def evaluation(shift: float) -> Evaluation:
    """Return the figures of a head of each kind."""
    return Evaluation(
        count=8, accuracy={"shape": 0.5 + shift, "tags": 0.9, "mask": 0.8}, top5={}, loss=0.25, calibration={},
        confusion={}, classes={}, rmse={"age": 2.5 + shift, "size": 1.0}, mae={"age": 1.5, "size": 0.75},
        r2={"age": 0.125 + shift, "size": None}, mean_ap={"tags": 0.625 - shift}, miou={"mask": 0.375 + shift},
    )  # fmt: skip


def test_a_sweep_has_the_figures_of_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Iterator[Evaluation] = iter([evaluation(0), evaluation(0.125)])

    def evaluate(*args: Any, **options: Any) -> Evaluation:
        return next(found)

    monkeypatch.setattr(training, "evaluate", evaluate)
    result = CliRunner().invoke(app, ["evaluate", "vitrail:tiny", "unread.csv", "--merge", "r=0,4"])
    assert result.exit_code == 0, result.output
    lines = [line.strip().partition("  ") for line in result.output.splitlines()]
    rows = {name: values.split() for name, _, values in lines}
    assert rows["accuracy, shape"] == ["50.00", "%", "62.50", "%"]
    assert rows["mAP, tags"] == ["62.50", "%", "50.00", "%"]
    assert rows["mIoU, mask"] == ["37.50", "%", "50.00", "%"]
    assert rows["RMSE, age"] == ["2.5", "2.625"]
    assert rows["MAE, size"] == ["0.75", "0.75"]
    assert rows["R², age"] == ["0.1250", "0.2500"]
    assert rows["R², size"] == ["–", "–"]
    assert not {"accuracy, tags", "accuracy, mask"} & rows.keys()
