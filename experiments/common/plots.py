"""Plots in the theme of the package; every seed is a dot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from experiments.common.statistics import mean_interval
from vitrail.drawing.theme import LIGHT, PLOT, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = SERIES
INK, PALE = LIGHT["soft"], LIGHT["rule"]
"""Colors of references and of what is in the background."""

TITLE = 36
"""Most characters in a line of a title that is a claim."""

Groups = Mapping[str, Sequence[float]]
Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]


@contextmanager
def figure(path: Path, *, columns: int = 1, width: float = 6.4, height: float = 3.6) -> Iterator[list[Axes]]:
    """Yield axes side by side, and save the figure as PNG, with a description for readers who do not see it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(cast(Any, PLOT)):
        fig, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False)
        try:
            yield list(axes[0])
            seen = "; ".join(filter(None, map(describe, axes[0])))
            fig.savefig(path, metadata={"Software": None, "Description": seen})
        finally:
            plt.close(fig)


def describe(axes: Axes) -> str:
    """Return in a line what axes show: their title, or where each of their lines ends."""
    title, x, y = (" ".join(text.split()) for text in (axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()))
    ends: dict[str, list[float]] = {}
    label, color = "", None
    for line in axes.get_lines():
        named, values = not str(line.get_label()).startswith("_"), np.asarray(line.get_ydata(), dtype=float)
        if named:
            label, color = str(line.get_label()), line.get_color()
        if len(values) and label and (named or line.get_color() == color):  # other seeds have the color of the first
            ends.setdefault(label, []).append(float(values[-1]))
    words = [
        f"{name} = {min(some):.3g}" + (f" to {max(some):.3g}" if max(some) > min(some) else "")
        for name, some in ends.items()
    ]
    what = f"{y} by {x}" if y else x
    at_end = f", at the end: {', '.join(words)}" if words and y else ""
    return ": ".join(filter(None, (title, f"{what}{at_end}")))


def description(path: Path) -> str:
    """Return the description of a figure that `figure` saved; the name of another image."""
    with Image.open(path) as image:
        return str(image.info.get("Description") or path.stem)


def dots(
    axes: Axes,
    groups: Groups,
    label: str,
    *,
    colors: Mapping[str, str] | None = None,
    spread: bool = True,
    title: str = "",
) -> None:
    """Draw each group as one dot per value, with the mean and a band for its 95 % interval over seeds.

    Groups are listed from top to bottom; the title adds which is highest. With ``spread=False`` only dots are drawn.
    """
    for position, (name, values) in enumerate(groups.items()):
        color = (colors or {}).get(name, COLORS[0])
        if spread:
            mean, interval = float(np.mean(values)), mean_interval(values)
            band: dict[str, Any] = {"linewidth": 6, "alpha": 0.25, "solid_capstyle": "butt"}
            axes.plot(interval, [position, position], color=color, **band)
            axes.plot([mean, mean], [position - 0.28, position + 0.28], color=color, linewidth=2)
        axes.plot(values, jitter(position, len(values)), "o", color=color, markersize=4, markeredgewidth=0, alpha=0.9)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    several = spread and any(len(values) > 1 for values in groups.values())
    axes.set_xlabel(f"{label}\n(band: 95 % interval of the mean over seeds)" if several else label)
    if spread:
        entitle(axes, groups, title=title)


def entitle(axes: Axes, groups: Groups, where: str = "", *, which: str = "highest", title: str = "") -> None:
    """Set the claim of a plot as its title, after a title that it may have."""
    axes.set_title(textwrap.fill(": ".join(filter(None, (title, claim(groups, where, which)))), TITLE), fontsize=9)


def claim(groups: Groups, where: str = "", which: str = "highest") -> str:
    """Return which group has the highest (or lowest) mean, and whether values of others reach into its own.

    >>> claim({"a": [1, 2], "b": [3, 4]}), claim({"a": [1, 3.5], "b": [3, 4]})
    ('highest: b, without overlap', 'highest on average: b; a overlaps')
    >>> claim({"a": [1, 2], "b": [3, 4]}, " at the end", "lowest")
    'lowest at the end: a, without overlap'
    """
    if len(groups) < 2:
        return ""
    sign = -1 if which == "lowest" else 1
    signed = {name: [sign * value for value in values] for name, values in groups.items()}
    top = max(signed, key=lambda name: float(np.mean(signed[name])))
    overlapping = [name for name, values in signed.items() if name != top and max(values) >= min(signed[top])]
    if not overlapping:
        return f"{which}{where}: {top}, without overlap"
    others = f"{overlapping[0]} overlaps" if len(overlapping) == 1 else f"{len(overlapping)} others overlap"
    return f"{which} on average{where}: {top}; {others}"


def jitter(position: float, count: int) -> list[float]:
    """Return ``count`` positions around one, so that equal values stay visible."""
    return [position + 0.3 * (at + 0.5) / count - 0.15 for at in range(count)]


def lines(
    axes: Axes, curves: Curves, xlabel: str, ylabel: str, *, styles: Mapping[str, Any] | None = None, band: bool = True
) -> None:
    """Draw the mean curve of each group with a band from its lowest to its highest seed, or every seed."""
    for number, (name, seeds) in enumerate(curves.items()):
        x = [at for at, _ in seeds[0]]
        y = np.array([[value for _, value in seed] for seed in seeds])
        style = {"color": COLORS[number % len(COLORS)], **(styles or {}).get(name, {})}
        if band:
            axes.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.15, linewidth=0)
        first, *others = [y.mean(0)] if band else y
        axes.plot(x, first, label=name, **{"linewidth": 1.8, **style})
        for other in others:
            axes.plot(x, other, **{"linewidth": 1.8, **style})
    axes.set(xlabel=xlabel, ylabel=ylabel)
    entitle(axes, {name: [seed[-1][1] for seed in seeds] for name, seeds in curves.items()}, " at the end")


def scatter_curves(axes: Axes, curves: Curves, xlabel: str, ylabel: str) -> None:
    """Draw the mean curve of each group through its settings, with a pale dot for every seed."""
    for number, (name, seeds) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        both = np.array(seeds, dtype=float)  # seeds, settings, (x, y)
        mean = both.mean(0)
        axes.plot(*both.reshape(-1, 2).T, "o", color=color, markersize=3, alpha=0.35, markeredgewidth=0)
        axes.plot(*mean.T, "-o", color=color, markersize=5, linewidth=1.4, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    entitle(axes, {name: [max(y for _, y in seed) for seed in seeds] for name, seeds in curves.items()}, " at best")


def legend(axes: Axes, *, own: bool = False) -> None:
    """Add a legend above the figure, or below these axes if ``own``."""
    if own:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0.2)
    else:
        handles, names = axes.get_legend_handles_labels()
        columns = 4 if axes.figure.get_figure(root=True).get_figwidth() > 8 else 3
        axes.figure.legend(handles, names, fontsize=8, loc="outside upper left", ncols=columns, handlelength=3)
