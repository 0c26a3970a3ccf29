"""The plot of a run's stability."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vitrail.drawing.plots import require_matplotlib
from vitrail.drawing.theme import LIGHT, PLOT, SERIES
from vitrail.training.stability.result import BRANCHES, Stability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANGE = 10.0
"""Least ratio of the ends of a color scale, so that noise does not look like a pattern."""

TITLES = {"attention": "attention", "mlp": "MLP"}


def plot_stability(found: Stability, kind: str = "png") -> bytes:
    """Plot loss and gradient norm by step, then gradients, branches and their scales by layer and step.

    Return the content of a file, ``png``, ``svg`` or ``pdf``. Spikes of the loss are red.
    """
    matplotlib = require_matplotlib(kind)
    with matplotlib.rc_context(PLOT):
        return _plot(matplotlib.figure.Figure, found, kind)


def _plot(make: Callable[..., Any], found: Stability, kind: str) -> bytes:
    maps = _maps(found)
    count = 2 + len(maps)
    columns = 4 if count > 6 else 3
    rows = -(-count // columns)
    figure = make(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    _curve(panels[0], found, found.loss, "loss")
    for spike in found.spikes:
        panels[0].axvspan(spike.first - 0.5, spike.last + 0.5, color=LIGHT["ruby"], alpha=0.3, linewidth=0)
    _curve(panels[1], found, found.gradient, "gradient norm before clipping")
    panels[1].set_yscale("log")
    for axes, (title, values) in zip(panels[2:], maps.items(), strict=False):
        _map(figure, axes, found, title, values)
    for axes in panels[count:]:
        axes.set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def _maps(found: Stability) -> dict[str, list[tuple[float, ...]]]:
    """Return values by interval and layer for each map, by title."""
    intervals = found.measured
    maps: dict[str, list[tuple[float, ...]]] = {}
    if found.intervals[0].gradient:
        maps["gradient norm"] = [one.gradient for one in found.intervals]
    if intervals:
        for branch in BRANCHES:
            maps[f"{TITLES[branch]}: added / stream"] = [one.share(branch) for one in intervals]
        for branch in BRANCHES:
            scales = [getattr(one, f"{branch}_scale") for one in intervals]
            if any(abs(one - 1) > 1e-3 for each in scales for one in each):
                maps[f"{TITLES[branch]}: scale (LayerScale)"] = scales
    return maps


def _curve(axes: Axes, found: Stability, values: tuple[float, ...], title: str) -> None:
    axes.plot(range(found.first, found.first + len(values)), values, linewidth=0.8, color=SERIES[0])
    axes.set(title=title, xlabel="step")


def _map(figure: Any, axes: Axes, found: Stability, title: str, values: list[tuple[float, ...]]) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    array = np.array(values).T
    largest = float(np.nanmax(array, initial=1e-12))
    smallest = min(float(np.nanmin(array[array > 0], initial=largest)), largest / RANGE)
    shown = axes.imshow(
        np.maximum(array, smallest),
        aspect="auto",
        origin="lower",
        cmap="viridis",
        norm=LogNorm(smallest, largest),
        extent=(found.first, found.first + len(found.loss), -0.5, len(array) - 0.5),
    )
    axes.set(title=title, xlabel="step", ylabel="layer")
    axes.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(shown, ax=axes)
