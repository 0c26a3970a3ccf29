"""Plots: matplotlib where it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vitrail.errors import InvalidOption

PLOT_FORMATS = ("png", "svg", "pdf")
"""File formats of plots."""


def require_matplotlib(kind: str) -> Any:
    """Return matplotlib; raise if the file format is unknown or matplotlib is missing."""
    if kind not in PLOT_FORMATS:
        raise InvalidOption(f"plots are {', '.join(PLOT_FORMATS)} files; got {kind or 'no suffix'!r}")
    try:
        import_module("matplotlib.figure")
        return import_module("matplotlib")
    except ImportError as error:
        raise InvalidOption("plots need matplotlib; install it with `pip install vitrail[plot]`") from error
