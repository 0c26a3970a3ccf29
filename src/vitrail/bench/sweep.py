"""Sweeps: the same benchmark for several values of one setting, and its plot."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import nn

from vitrail.bench.benchmark import Tell, run
from vitrail.bench.config import BenchConfig
from vitrail.bench.result import BenchResult
from vitrail.errors import InvalidOption

SWEPT = {"r": "tokens merged per layer (r)", "batch": "images per batch"}
"""Settings that can be swept, with their axis labels."""

PLOT_FORMATS = ("png", "svg", "pdf")
COLORS = {"unmerged": "#7f7f7f", "sliced": "#d9a441", "merged": "#1f5fa8"}


def sweep(
    config: BenchConfig,
    name: str,
    values: Sequence[int],
    *,
    model: nn.Module | None = None,
    tell: Tell | None = None,
) -> Iterator[BenchResult]:
    """Run the benchmark for each value of a setting; yield each result as soon as it is ready.

    ``name`` is ``r`` or ``batch``; ``model`` and ``tell`` are those of `run`.
    """
    _check_swept(name)
    for value in values:
        told = None if tell is None else (lambda text, value=value: tell(f"{name} = {value}: {text}"))
        yield run(replace(config, **{name: value}), model=model, tell=told)  # type: ignore[arg-type]


def series(results: Sequence[BenchResult], name: str) -> dict[str, list[float]]:
    """Return the lines of a sweep: the throughput of each variant in its best mode, speed-up and efficiency.

    NaN stands for what was not measured.
    """
    _check_swept(name)
    variants = dict.fromkeys(row.variant for result in results for row in result.rows)
    best = {variant: [result.best(variant) for result in results] for variant in variants}
    lines = {variant: [None if row is None else row.images_per_s for row in rows] for variant, rows in best.items()}
    lines["speed-up"] = [result.speedup for result in results]
    lines["efficiency"] = [result.efficiency for result in results]
    return {name: [math.nan if value is None else value for value in line] for name, line in lines.items()}


def plot(results: Sequence[BenchResult], name: str, form: str = "png") -> bytes:
    """Plot throughput, speed-up and efficiency over the swept value; return the file's content."""
    figure = require_matplotlib(form)(figsize=(10, 4), layout="constrained")
    values, lines = [getattr(result.config, name) for result in results], series(results, name)
    left, right = figure.subplots(1, 2)
    for variant in (one for one in COLORS if one in lines):
        left.plot(values, lines[variant], "o-", label=variant, color=COLORS[variant])
    left.set_ylabel("images/s, best mode")
    left.set_ylim(bottom=0)
    right.plot(values, lines["speed-up"], "o-", label="speed-up over unmerged", color="#1f5fa8")
    right.plot(values, lines["efficiency"], "s--", label="efficiency (sliced ÷ merged)", color="#d9a441")
    right.set_ylabel("ratio of medians")
    right.axhline(1.0, color="#7f7f7f", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel(SWEPT[name])
        if name == "batch":
            axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.legend()
        axes.grid(alpha=0.3)
    config, machine, (height, width) = results[0].config, results[0].machine, results[0].size
    fixed = f"batch {config.batch}" if name == "r" else f"r = {config.r}"
    task = ", training" if config.train else ""
    figure.suptitle(f"{config.model}, {height} × {width}, {fixed}, {config.dtype}{task} · {machine['device']}")
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=150)
    return content.getvalue()


def require_matplotlib(form: str) -> Any:
    """Return matplotlib's ``Figure``; raise if the file format is unknown or matplotlib is missing."""
    if form not in PLOT_FORMATS:
        raise InvalidOption(f"plots are {', '.join(PLOT_FORMATS)} files; got {form or 'no suffix'!r}")
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise InvalidOption("plots need matplotlib; install it with `pip install vitrail[plot]`") from error


def _check_swept(name: str) -> None:
    if name not in SWEPT:
        raise InvalidOption(f"only {' and '.join(SWEPT)} can be swept; got {name!r}")
