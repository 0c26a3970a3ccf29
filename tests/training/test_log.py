"""Training log: means kept on the device, JSON lines, and TensorBoard."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.errors import InvalidOption, VitrailWarning
from vitrail.training.log import Log, Meter, read_log, tensorboard_writer
from vitrail.training.objective.objective import Terms


def terms(total: float, **parts: float) -> Terms:
    return Terms(torch.tensor(total), {name: torch.tensor(value) for name, value in parts.items()})


def test_means_and_their_way_through_a_checkpoint() -> None:
    meter = Meter(torch.device("cpu"))
    assert meter.means(lambda sums: sums) == {}
    meter.add(terms(1.0, cls=2.0), 0)
    other = Meter(torch.device("cpu"))
    other.restore(meter.to_dict())
    for one in (meter, other):
        one.add(terms(3.0, cls=5.0), 1)
        assert one.means(lambda sums: sums) == {"loss": 2.0, "cls": 3.5}
        assert one.first_nonfinite() is None
        one.reset()
        assert one.means(lambda sums: sums) == {}
    meter.add(terms(1.0, cls=1.0), 2)
    assert meter.means(lambda sums: sums.mul_(2)) == {"loss": 1.0, "cls": 1.0}  # as two ranks would add up


def test_the_first_step_that_is_not_finite_is_remembered() -> None:
    meter = Meter(torch.device("cpu"))
    nan, inf = float("nan"), float("inf")
    meter.add(terms(1.0, cls=1.0, distillation=1.0), 4)
    meter.add(terms(inf, cls=1.0, distillation=inf), 5)
    meter.add(terms(nan, cls=nan, distillation=nan), 6)
    assert meter.first_nonfinite() == (5, ["distillation"])
    alone = Meter(torch.device("cpu"))
    alone.add(terms(nan, cls=1.0), 2)
    assert alone.first_nonfinite() == (2, ["loss"])


def test_lines_are_truncated_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    for step in range(4):
        log.write("epoch", step=step, loss=step / 2)
    with path.open("a") as file:
        file.write('{"kind": "epoch", "st')  # cut off by a crash
    log.trim(2)
    log.write("evaluation", step=3)
    assert [(line["kind"], line["step"]) for line in read_log(path)] == [
        *(("epoch", step) for step in range(3)),
        ("evaluation", 3),
    ]
    assert read_log(path, "evaluation") == [{"kind": "evaluation", "step": 3}]
    Log(None).write("epoch", step=1)
    Log(tmp_path / "none.jsonl").trim(1)


def test_a_log_that_cannot_be_written_is_a_warning_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "no folder" / "log.jsonl")
    with pytest.warns(VitrailWarning, match="training continues"):
        log.write("epoch", step=1)
    log.write("epoch", step=2)


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append(("closed", 0, 0))

    board: Any = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    log = Log(tmp_path / "log.jsonl", tmp_path / "board")
    log.write("epoch", step=3, lr=0.5, losses={"cls": 1.5}, name="x", on=True)
    log.close()
    assert written == [("epoch/lr", 0.5, 3), ("epoch/losses/cls", 1.5, 3), ("closed", 0, 0)]


def test_missing_tensorboard_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InvalidOption, match=r"pip install vitrail\[train\]"):
        tensorboard_writer()
