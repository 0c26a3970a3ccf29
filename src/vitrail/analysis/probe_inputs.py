"""What probes and evaluations check before they fit anything."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput

Array = Tensor | NDArray[Any]
"""What evaluations take: a tensor on any device, or a NumPy array."""

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
    check_finite(tensor, name)
    return tensor


def check_finite(values: Tensor, name: str) -> None:
    """Refuse vectors (along the last axis) that hold a number that is not finite, and say how many there are."""
    step = max(1, CHUNK // max(1, values[0].numel()))
    bad = sum(int((~torch.isfinite(part)).any(-1).sum()) for part in values.split(step))
    if bad:
        total = values.numel() // values.shape[-1]
        raise UnsupportedInput(
            f"{bad} of {total} vectors in {name} hold NaN or infinity; leave them out, or record them in float32"
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


def as_grid(grid: tuple[int, ...], patches: int) -> tuple[int, int, int]:
    """Take a grid (h, w) or (t, h, w) that holds that many patches."""
    full = (1, *grid) if len(grid) == 2 else tuple(grid)
    if len(full) != 3 or min(full) < 1 or full[0] * full[1] * full[2] != patches:
        raise UnsupportedInput(
            f"a grid of {tuple(grid)} does not hold {patches} patches; expected (h, w) or (t, h, w) of that product"
        )
    return full[0], full[1], full[2]


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
