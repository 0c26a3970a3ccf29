"""Sweeps: one benchmark per value, their lines, and the plot."""

import importlib.util
import math
from typing import Any

import pytest
from torch import nn

from tests.bench.models import FULL, result, row
from vitrail.bench import BenchConfig, BenchResult
from vitrail.bench import sweep as module
from vitrail.bench.sweep import plot, series, sweep
from vitrail.errors import InvalidOption

CONFIG = BenchConfig("timm:vit", r=4, batch=8)


def results() -> list[BenchResult]:
    small = result(
        row("unmerged", "eager", 10.0), row("merged", "eager", 8.0), config=BenchConfig("timm:vit", r=2, batch=8)
    )
    return [small, result(*FULL, config=CONFIG)]


@pytest.mark.parametrize(("name", "values"), [("r", [0, 8]), ("batch", [1, 4])])
def test_one_benchmark_per_value(name: str, values: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[BenchConfig] = []
    messages: list[str] = []
    given = nn.Identity()

    def run(config: BenchConfig, model: object, tell: Any) -> BenchResult:
        assert model is given
        measured.append(config)
        tell("here")
        return result(config=config)

    monkeypatch.setattr(module, "run", run)
    found = list(sweep(CONFIG, name, values, model=given, tell=messages.append))
    assert [getattr(config, name) for config in measured] == values
    assert [entry.config for entry in found] == measured
    assert messages == [f"{name} = {value}: here" for value in values]
    other = "batch" if name == "r" else "r"
    assert {getattr(config, other) for config in measured} == {getattr(CONFIG, other)}


def test_series_use_the_best_modes() -> None:
    lines = series(results(), "batch")
    assert lines["unmerged"] == pytest.approx([800.0, 400.0])
    assert series(results(), "r")["unmerged"] == pytest.approx([600.0, 600.0])  # one model
    assert lines["merged"] == pytest.approx([1000.0, 640.0])
    assert math.isnan(lines["sliced"][0])
    assert lines["sliced"][1] == pytest.approx(8 / 0.012)
    assert lines["speed-up"] == pytest.approx([1.25, 1.6])
    assert math.isnan(lines["efficiency"][0])
    assert lines["efficiency"][1] == pytest.approx(0.96)


def test_missing_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("vitrail.drawing.plots.import_module", missing)
    with pytest.raises(InvalidOption, match=r"vitrail\[plot\]"):
        plot(results(), "r")


def test_unknown_plot_format() -> None:
    with pytest.raises(InvalidOption, match="'bmp'"):
        plot(results(), "r", "bmp")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("name", ["r", "batch", "merge"])
def test_plot(name: str) -> None:
    assert plot(results(), name).startswith(b"\x89PNG")
    assert plot(results(), name, "svg").startswith(b"<?xml")
