"""Checks of options, shared by all layers: small predicates, and checks that raise `InvalidOption`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard

import torch

from vitrail.errors import InvalidOption

MAX_INT = 2**63 - 1
"""Largest integer that torch takes, and so the largest that an option takes."""


def shown(value: Any, limit: int = 100) -> str:
    """Return a value for a message: its ``repr``, cut where it is long; messages must not fail or fill a screen."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4,300 digits, or an object's own repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 20]} … {text[-15:]}"


def is_int(value: Any, low: int | None = None, high: int = MAX_INT) -> TypeGuard[int]:
    """Return whether a value is an integer (not a bool), at least ``low`` and at most ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and value <= high and (low is None or value >= low)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: Any) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def check_int(name: str, value: Any, low: int = 1) -> None:
    """Raise unless an option is an integer (numpy's included, not a bool), ``low`` or more."""
    right = isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= MAX_INT
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
        raise InvalidOption(f"{name}={shown(value)}: expected {expected}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless an option is True or False."""
    check(name, value, isinstance(value, bool), "True or False")


def check_callable(name: str, value: Any) -> None:
    """Raise unless an option is a function, or None."""
    check(name, value, value is None or callable(value), "a function, or None")


def as_path(name: str, value: Any) -> Path:
    """Return a path that a system can have: text or a path object, without NUL, and no name too long.

    Looking for any other one raises errors of the system.
    """
    try:
        data = os.fsencode(value) if isinstance(value, str | os.PathLike) else b""
    except (TypeError, UnicodeError):
        data = b""
    right = data and b"\0" not in data and len(data) < 4096 and max(map(len, data.split(b"/"))) < 256
    check(name, value, bool(right), "a path: text or a path object, with names of at most 255 bytes")
    return Path(value)


def as_device(name: str, value: Any, counted: Mapping[str, int] | None = None) -> torch.device:
    """Return a device that exists, by its torch device, its name or its number.

    ``counted`` has the number of devices by type; by default those of this machine.
    """
    expected = "a device such as 'cpu', 'cuda' or 'cuda:0'"
    right = isinstance(value, torch.device | str) or is_int(value, 0)
    try:
        device = torch.device(value) if right else None
    except (RuntimeError, OverflowError, ValueError):
        device = None
    if device is not None and device.type not in ("cpu", "cuda"):
        backend = getattr(torch, device.type, None) or getattr(torch.backends, device.type, None)
        device = device if getattr(backend, "is_available", bool)() else None
    if device is None:
        raise InvalidOption(f"{name}={shown(value)}: expected {expected}")
    counts = {"cuda": torch.cuda.device_count()} if counted is None else counted
    there = counts.get(device.type)
    if there is not None and (device.index or 0) >= there:
        raise InvalidOption(
            f"{name}={shown(value)}: this machine has {there or 'no'} CUDA device{'' if there == 1 else 's'}; expected "
            f"{'a number below ' + str(there) + ', or ' if there else ''}'cpu', or leave {name} out"
        )
    return device


def check_sizes(values: Any, where: str) -> None:
    """Raise for numbers in a file's configuration that no model has; building it would take all memory.

    Nested lists and mappings are searched. Numbers of layers are limited most: a model is built layer by layer.
    """
    stack: list[tuple[str, Any, int]] = [("", values, 0)]
    while stack:
        name, value, level = stack.pop()
        if level > 50:
            raise InvalidOption(f"{where}: {name} is nested in more than 50 levels; expected a model's configuration")
        if isinstance(value, Mapping):
            stack += [(str(key), one, level + 1) for key, one in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(name, one, level + 1) for one in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            layers = "layers" in name or "depth" in name
            high = MAX_LAYERS if layers else MAX_SIZE
            if value > high:
                raise InvalidOption(f"{where}: {name}={shown(value)}; expected at most {high}")


MAX_LAYERS, MAX_SIZE = 2**12, 2**28
"""Largest numbers of layers, and of anything else, in the configuration of a model that is read from a file."""


def as_tuple(value: Any, scalar: Any = str) -> tuple[Any, ...]:
    """Return an iterable as a tuple, and anything else, or an instance of ``scalar``, as a tuple of one."""
    several = isinstance(value, Iterable) and not isinstance(value, scalar) and getattr(value, "ndim", 1) > 0
    return tuple(value) if several else (value,)
