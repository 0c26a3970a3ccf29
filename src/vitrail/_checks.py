"""Type checks of options, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, TypeGuard


def is_int(value: Any, low: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer (not a bool), and at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and (low is None or value >= low)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def as_tuple(value: Any, scalar: Any = str) -> tuple[Any, ...]:
    """Return an iterable as a tuple, and anything else, or an instance of ``scalar``, as a tuple of one."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, scalar) else (value,)
