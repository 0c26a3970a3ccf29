"""Sweeps: the same benchmark for several values of one setting, and its plot."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import nn

from vitrail.bench.benchmark import Tell, run
from vitrail.bench.config import BenchConfig
from vitrail.bench.result import BenchResult
from vitrail.drawing.plots import require_matplotlib
from vitrail.drawing.theme import LIGHT, PLOT, SERIES

SWEPT = {"r": "tokens merged per layer (r)", "batch": "images per batch", "merge": "merging"}
"""Settings that can be swept, with their axis labels."""

COLORS = {"unmerged": LIGHT["soft"], "sliced": SERIES[1], "merged": SERIES[0]}


def sweep(
    config: BenchConfig, name: str, values: Sequence[int] | Sequence[str], *, model: nn.Module, tell: Tell
) -> Iterator[BenchResult]:
    """Run the benchmark for each value of one of :data:`SWEPT`; yield each result as soon as it is ready."""
    for value in values:

        def tell_with_value(text: str, value: int | str = value) -> None:
            tell(f"{name} = {value}: {text}")

        yield run(replace(config, **{name: value}), model=model, tell=tell_with_value)  # type: ignore[arg-type]


def series(results: Sequence[BenchResult], name: str) -> dict[str, list[float]]:
    """Return the lines of a sweep: throughput of each variant in its best mode, speed-up, efficiency; else NaN.

    Unless the batch size changes, the unmerged model is the same in all runs, so its throughput is one number, the
    median of the runs. The ratios are those of each run.
    """
    best = {variant: [result.best(variant) for result in results] for variant in COLORS}
    lines = {variant: [None if row is None else row.images_per_s for row in rows] for variant, rows in best.items()}
    unmerged = [value for value in lines["unmerged"] if value is not None]
    if name != "batch" and unmerged:
        lines["unmerged"] = [median(unmerged)] * len(results)
    lines["speed-up"] = [result.speedup for result in results]
    lines["efficiency"] = [result.efficiency for result in results]
    return {name: [math.nan if value is None else value for value in line] for name, line in lines.items()}


def plot(results: Sequence[BenchResult], name: str, kind: str = "png") -> bytes:
    """Plot throughput, speed-up and efficiency over the swept value; return the file's content."""
    matplotlib = require_matplotlib(kind)
    with matplotlib.rc_context(PLOT):
        return _plot(matplotlib.figure.Figure(figsize=(10, 4)), results, name, kind)


def _plot(figure: Any, results: Sequence[BenchResult], name: str, kind: str) -> bytes:
    labels, lines = [str(getattr(result.config, name)) for result in results], series(results, name)
    places = range(len(labels)) if name == "merge" else [int(label) for label in labels]
    left, right = figure.subplots(1, 2)
    for variant in COLORS:
        left.plot(places, lines[variant], "o-", label=variant, color=COLORS[variant])
    left.set_ylabel("images/s, best mode")
    left.set_ylim(bottom=0)
    right.plot(places, lines["speed-up"], "o-", label="speed-up over unmerged", color=COLORS["merged"])
    right.plot(places, lines["efficiency"], "s--", label="efficiency (sliced ÷ merged)", color=COLORS["sliced"])
    right.set_ylabel("ratio of medians")
    right.axhline(1.0, color=COLORS["unmerged"], linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel(SWEPT[name])
        if name == "batch":
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, labels)
        axes.legend()
    config, machine, size = results[0].config, results[0].machine, " × ".join(map(str, results[0].size))
    fixed = config.merging_text if name == "batch" else f"batch {config.batch}"
    task = ", training" if config.train else ""
    figure.suptitle(f"{config.model}, {size}, {fixed}, {config.dtype}{task} · {machine['device']}")
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()
