"""Sweeps: the same measurement for several values of one setting, and a picture of it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import nn

from vitrail.bench.config import BenchConfig
from vitrail.bench.measuring import Tell, run
from vitrail.bench.result import BenchResult
from vitrail.errors import InvalidOption

SWEPT = {"r": "tokens merged per layer (r)", "batch": "pictures in a batch"}
"""Settings that can be swept, with their names for an axis."""

PLOT_FORMATS = ("png", "svg", "pdf")
COLOURS = {"unmerged": "#7f7f7f", "sliced": "#d9a441", "merged": "#1f5fa8"}


def sweep(
    config: BenchConfig,
    name: str,
    values: Sequence[int],
    *,
    model: nn.Module | None = None,
    tell: Tell | None = None,
) -> Iterator[BenchResult]:
    """Measure for each value of a setting in turn; each result comes as soon as it is there.

    Args:
        config: what to measure.
        name: the setting, ``r`` or ``batch``.
        values: its values.
        model: a model to take each time instead of loading the one that ``config`` names.
        tell: called with a few words whenever something new begins.
    """
    check_swept(name)
    for value in values:
        named = None if tell is None else _named(tell, f"{name} = {value}")
        yield run(replace(config, **{name: value}), model=model, tell=named)  # type: ignore[arg-type]


def _named(tell: Tell, name: str) -> Tell:
    return lambda text: tell(f"{name}: {text}")


@dataclass(frozen=True)
class Series:
    """A sweep as lines: a figure for each value, None where it was not measured."""

    values: list[int]
    throughput: dict[str, list[float | None]]
    speedup: list[float | None]
    efficiency: list[float | None]


def series(results: Sequence[BenchResult], name: str) -> Series:
    """Read the lines of a sweep off its results, each variant in its best form."""
    check_swept(name)
    variants = dict.fromkeys(row.variant for result in results for row in result.rows)
    best = {variant: [result.best(variant) for result in results] for variant in variants}
    return Series(
        values=[getattr(result.config, name) for result in results],
        throughput={
            variant: [None if row is None else row.images_per_s for row in rows] for variant, rows in best.items()
        },
        speedup=[result.speedup for result in results],
        efficiency=[result.efficiency for result in results],
    )


def plot(results: Sequence[BenchResult], name: str, form: str = "png") -> bytes:
    """Draw throughput, speed-up and efficiency over the swept value; gives the file's content."""
    figure_class = _matplotlib(form)
    lines = series(results, name)
    figure = figure_class(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for variant, heights in lines.throughput.items():
        left.plot(lines.values, _with_gaps(heights), "o-", label=variant, color=COLOURS.get(variant))
    left.set_ylabel("pictures per second, best form")
    left.set_ylim(bottom=0)
    right.plot(lines.values, _with_gaps(lines.speedup), "o-", label="speed-up over unmerged", color="#1f5fa8")
    right.plot(lines.values, _with_gaps(lines.efficiency), "s--", label="efficiency (sliced ÷ merged)", color="#d9a441")
    right.set_ylabel("ratio of medians")
    right.axhline(1.0, color="#7f7f7f", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel(SWEPT[name])
        if name == "batch":
            axes.set_xscale("log", base=2)
        axes.set_xticks(lines.values, [str(value) for value in lines.values])
        axes.legend()
        axes.grid(alpha=0.3)
    config, machine, (height, width) = results[0].config, results[0].machine, results[0].size
    fixed = f"batch {config.batch}" if name == "r" else f"r = {config.r}"
    mode = ", training" if config.train else ""
    figure.suptitle(f"{config.model}, {height} × {width}, {fixed}, {config.dtype}{mode} · {machine['device']}")
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=150)
    return content.getvalue()


def check_plot(form: str) -> None:
    """Raise where a plot of that format could not be drawn, before anything is measured for it."""
    _matplotlib(form)


def check_swept(name: str) -> None:
    """Raise for a setting that cannot be swept."""
    if name not in SWEPT:
        raise InvalidOption(f"a sweep is over {' or '.join(SWEPT)}; got {name!r}")


def _matplotlib(form: str) -> Any:
    if form not in PLOT_FORMATS:
        raise InvalidOption(f"plots are {', '.join(PLOT_FORMATS)} files; got {form or 'no ending'!r}")
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise InvalidOption(
            "drawing a plot needs matplotlib; install it with `pip install vitrail[plot]`, or leave the plot out"
        ) from error


def _with_gaps(heights: Sequence[float | None]) -> list[float]:
    return [float("nan") if height is None else height for height in heights]
