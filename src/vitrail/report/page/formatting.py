"""Numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MISSING = "–"


def percent(share: float | None) -> str:
    """Format a share: "2.4 %", "0.31 %"; a dash if there is none."""
    if share is None or not math.isfinite(share):
        return MISSING
    value = 100 * share
    return f"{value:.0f} %" if value == 0 or value >= 99.95 else f"{value:.3g} %" if value < 10 else f"{value:.1f} %"


def number(value: float | None) -> str:
    """Format a number with three digits; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def confidence(value: float | None) -> str:
    """Format a confidence, never as certainty."""
    if value is None:
        return "unknown"
    return "more than 99.9 %" if value > 0.999 else percent(value)


def count(many: int, noun: str) -> str:
    """Format a count with its noun: "1 image", "3 images"."""
    return f"{many:,} {noun if many == 1 else noun + 's'}"


def interval(
    value: Mapping[str, Any] | None, write: Callable[[float | None], str] = number, center: str = "mean"
) -> str:
    """Format a number with its confidence interval: "12 % (10 to 14 %)"; a dash if there is none."""
    if value is None or value.get(center) is None:
        return MISSING
    low, high = value.get("low"), value.get("high")
    if low is None or high is None:
        return write(value[center])
    return f"{write(value[center])} ({write(low)} to {write(high)})".replace(" % to", " to")
