"""The palette and the font of everything that Vitrail draws: sheets, plots, reports and the page of ``vitrail web``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIGHT = {
    "page": "#f6efe0",
    "card": "#fffaf0",
    "ink": "#1d1a26",
    "soft": "#5f5866",
    "rule": "#ddd1ba",
    "rail": "#eadfc9",
    "cobalt": "#2456b8",
    "on-cobalt": "#fffaf0",
    "amber": "#b8700f",
    "ruby": "#a81f3c",
    "green": "#1f6b45",
    "note": "#f8e6c2",
}
"""Cream, ink, cobalt, amber, ruby: colors by what they are for, each readable as text on ``page`` and ``card``."""

DARK = {
    "page": "#14121a",
    "card": "#1e1b27",
    "ink": "#f3ebdb",
    "soft": "#b1a8b4",
    "rule": "#38323f",
    "rail": "#2c2734",
    "cobalt": "#8badff",
    "on-cobalt": "#14121a",
    "amber": "#f0b35a",
    "ruby": "#ff8399",
    "green": "#7ed6a0",
    "note": "#39301d",
}
"""The same colors for dark screens."""

ON_ANY_PAGE = {"cobalt": "#4a7fe0", "amber": "#c8801f"}
"""Colors of drawings inside pages of others, such as notebooks, light or dark."""

SERIES = (LIGHT["cobalt"], "#e09a2b", LIGHT["ruby"], "#3f8f6b", "#7b4f9d", "#6aa9d8", LIGHT["ink"])
"""Colors of the series of a plot, the most distinct first, apart in lightness as well as in hue."""

FONT = ("Inter", "Segoe UI", "Roboto", "Helvetica Neue", "DejaVu Sans")
"""Fonts of plots and pages; the first that is installed is used. Sheets have the one font that Pillow brings."""

PLOT: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": list(FONT),
    "font.size": 10,
    "text.color": LIGHT["ink"],
    "figure.facecolor": LIGHT["card"],
    "savefig.facecolor": LIGHT["card"],
    "axes.facecolor": LIGHT["card"],
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.labelcolor": LIGHT["ink"],
    "image.cmap": "viridis",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 192,
}
"""Settings of matplotlib for all plots."""

_DARK_SCREEN = '@media screen and (prefers-color-scheme: dark) {{\n:root:not([data-theme="light"]) {{ {} }}\n}}\n'


def rgb(color: str) -> tuple[int, int, int]:
    """Return red, green and blue from 0 to 255.

    >>> rgb("#f6efe0")
    (246, 239, 224)
    """
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


def css() -> str:
    """Return the palette as variables of a style sheet: ``--page``, ``--cobalt``, ``--font`` and so on.

    Pages are light or dark as the reader's system is; ``data-theme`` of the root element decides otherwise. Paper is
    always light.
    """
    fonts = ", ".join(f'"{name}"' for name in FONT)
    return (
        f":root {{ {_variables('light', LIGHT)}; --font: {fonts}, system-ui, sans-serif }}\n"
        + _DARK_SCREEN.format(_variables("dark", DARK))
        + f':root[data-theme="dark"] {{ {_variables("dark", DARK)} }}\n'
    )


def _variables(scheme: str, palette: Mapping[str, str]) -> str:
    return "; ".join([f"color-scheme: {scheme}", *(f"--{name}: {color}" for name, color in palette.items())])
