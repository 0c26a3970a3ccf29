"""Checks of options, shared by all layers: small predicates, and checks that raise `InvalidOption`."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeGuard

from vitrail.errors import InvalidOption


def is_int(value: Any, low: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer (not a bool), and at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and (low is None or value >= low)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def check_int(name: str, value: Any, low: int = 1) -> None:
    """Raise unless an option is an integer (numpy's included, not a bool), ``low`` or more."""
    right = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low
    check(name, value, right, f"a whole number, {low} or more")


def check_share(name: str, value: Any, *, zero: bool = True, one: bool = True) -> None:
    """Raise unless an option is a number from 0 to 1 (numpy's included), with or without the ends."""
    right = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1
    right = right and (zero or value > 0) and (one or value < 1)
    check(name, value, right, f"a number {'from' if zero else 'above'} 0, {'up to' if one else 'below'} 1")


def check_positive(name: str, value: Any) -> None:
    """Raise unless an option is a finite number above 0."""
    check(name, value, is_number(value) and value > 0, "a number above 0")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless an option is one of some strings."""
    choices = tuple(choices)
    check(name, value, isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless a rank is one of ``world_size``."""
    if not 0 <= rank < world_size:
        raise InvalidOption(f"rank={rank}, world_size={world_size}: expected a rank from 0 to world_size - 1")


def check(name: str, value: Any, right: bool, expected: str) -> None:
    """Raise with what was given and what is expected, unless an option is right."""
    if not right:
        raise InvalidOption(f"{name}={value!r}: expected {expected}")


def as_tuple(value: Any, scalar: Any = str) -> tuple[Any, ...]:
    """Return an iterable as a tuple, and anything else, or an instance of ``scalar``, as a tuple of one."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, scalar) else (value,)
