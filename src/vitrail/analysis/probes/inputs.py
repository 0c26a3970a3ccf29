"""What probes and evaluations check before they fit anything."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput

Array = Tensor | NDArray[Any]
"""What evaluations take: a tensor on any device, or a NumPy array."""

Grid = tuple[int, int] | tuple[int, int, int]

CHUNK = 2**24
"""Numbers that one intermediate result may hold; larger work is cut into pieces."""


def as_tensor(value: Array, name: str, shape: str) -> Tensor:
    """Take an array as a tensor; ``shape`` names its axes, such as ``"B P D"``, and none of them may be empty."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()
    tensor = torch.as_tensor(value).detach()
    if tensor.ndim != len(shape.split()) or 0 in tensor.shape:
        raise UnsupportedInput(
            f"{name} has shape {tuple(tensor.shape)}; expected ({', '.join(shape.split())}), not empty"
        )
    return tensor


def as_features(value: Array, name: str, shape: str) -> Tensor:
    """Take an array of features: floating point, in any precision, and finite."""
    tensor = as_tensor(value, name, shape)
    if not tensor.is_floating_point():
        raise UnsupportedInput(f"{name} is of type {tensor.dtype}; expected floating point: convert it with .float()")
    check_finite(tensor, name, "pictures" if tensor.ndim > 2 else "rows")
    return tensor


def check_finite(values: Tensor, name: str, each: str = "pictures") -> None:
    """Refuse vectors (along the last axis) that hold a number that is not finite.

    The error says how many there are, and which rows of the first axis have them; ``each`` is what these rows are.
    """
    step = max(1, CHUNK // max(1, values[0].numel())) if len(values) else 1
    bad, rows = 0, []
    for number, part in enumerate(values.detach().split(step)):
        wrong = ~torch.isfinite(part).all(-1).reshape(len(part), -1)
        bad += int(wrong.sum())
        rows += [number * step + row for row in wrong.any(1).nonzero().flatten().tolist()]
    if bad:
        total = values.numel() // values.shape[-1]
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise UnsupportedInput(
            f"{bad} of {total} vectors in {name} are not finite, in {len(rows)} of {len(values)} {each} (number "
            f"{shown}); leave them out, or record them in float32"
        )


def as_labels(value: Array, count: int, name: str = "labels") -> Tensor:
    """Take the labels of ``count`` pictures: whole numbers from 0, of two classes or more."""
    labels = as_whole(value, name, "B")
    if len(labels) != count:
        raise UnsupportedInput(f"{name} are {len(labels)}, the pictures {count}; give one for each picture")
    if int(labels.min()) < 0:
        raise UnsupportedInput(
            f"{int((labels < 0).sum())} of {count} {name} are negative, which often means unlabelled; "
            "leave these pictures out, and number the classes from 0"
        )
    if int(labels.min()) == int(labels.max()):
        raise UnsupportedInput(
            f"all {count} {name} are {int(labels[0])}; a probe needs pictures of two classes or more"
        )
    return labels


def as_whole(value: Array, name: str, shape: str) -> Tensor:
    """Take an array of whole numbers (or yes and no)."""
    tensor = as_tensor(value, name, shape)
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedInput(f"{name} is of type {tensor.dtype}; expected whole numbers: convert it with .long()")
    return tensor.long()


def as_outliers(value: Array, tokens: Tensor) -> Tensor:
    """Take the mask of outliers that belongs to patch tokens (B, P, D)."""
    outliers = as_tensor(value, "outliers", "B P")
    if outliers.dtype != torch.bool or outliers.shape != tokens.shape[:2]:
        raise UnsupportedInput(
            f"outliers is {outliers.dtype} of shape {tuple(outliers.shape)}; "
            f"expected bool of shape {tuple(tokens.shape[:2])}: one for each patch token"
        )
    return outliers.to(tokens.device)


def whole_grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """Give a grid as (time, height, width); a grid of two numbers is one frame.

    >>> whole_grid((3, 4)), whole_grid((2, 3, 4))
    ((1, 3, 4), (2, 3, 4))
    """
    if len(grid) not in (2, 3) or min(grid) < 1:
        raise InvalidOption(f"the grid is (height, width) or (time, height, width), each 1 or more; got {grid}")
    time, height, width = (1, *grid) if len(grid) == 2 else grid
    return int(time), int(height), int(width)


def as_grid(grid: tuple[int, ...], patches: int) -> tuple[int, int, int]:
    """Take a grid (h, w) or (t, h, w) that holds that many patches."""
    whole = whole_grid(grid)
    if prod(whole) != patches:
        raise UnsupportedInput(
            f"a grid of {tuple(grid)} does not hold {patches} patches; expected (h, w) or (t, h, w) of that product"
        )
    return whole


def check_count(value: int, name: str, least: int = 1) -> int:
    """Refuse a number of something that is not a whole number, or too low."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidOption(f"{name} is a whole number, {least} or more; got {value!r}")
    return number


def check_share(value: float, name: str) -> float:
    """Refuse a share that leaves nothing on one of its sides."""
    if not 0 < value < 1:
        raise InvalidOption(f"{name} is a share above 0 and below 1; got {value!r}")
    return float(value)
