"""Input checks, chunking, and pooling to the patch grid, shared by all analyses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput

Array = Tensor | NDArray[Any]
Grid = tuple[int, int] | tuple[int, int, int]

CHUNK = 2**24
"""Most numbers that one intermediate result may hold; larger work is split."""


def chunks(count: int, each: int, start: int = 0) -> Iterator[slice]:
    """Yield slices over ``count`` items that hold at most :data:`CHUNK` numbers, with ``each`` numbers per item."""
    step = max(1, CHUNK // max(1, each))
    for first in range(start, count, step):
        yield slice(first, min(first + step, count))


def map_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, each: int) -> Tensor:
    """Apply a function to a few rows at a time, with ``each`` numbers per row, and join the results."""
    return torch.cat([function(rows[part]) for part in chunks(len(rows), each)])


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor without gradients, in float32 or float64."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def check_shape(tensor: Tensor, name: str, shape: str, hint: str = "") -> None:
    """Raise unless a tensor has the axes of ``shape``, names or sizes such as ``"B 196 D"``, none of them empty."""
    axes = shape.split()
    if not isinstance(tensor, Tensor):
        raise UnsupportedInput(f"{name} is a tensor ({', '.join(axes)}); got {type(tensor).__name__}")
    sizes = [size if axis.isdigit() else axis for size, axis in zip(map(str, tensor.shape), axes, strict=False)]
    if tensor.ndim != len(axes) or 0 in tensor.shape or sizes != axes:
        given = tuple(tensor.shape)
        raise UnsupportedInput(f"{name}: shape {given} given; expected ({', '.join(axes)}), not empty{hint}")


def as_tensor(value: Array, name: str, shape: str) -> Tensor:
    """Return an array as a tensor of a shape; see :func:`check_shape`."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()
    tensor = torch.as_tensor(value).detach()
    check_shape(tensor, name, shape)
    return tensor


def as_integers(value: Array, name: str, shape: str) -> Tensor:
    """Return an array of integers or booleans as int64."""
    tensor = as_tensor(value, name, shape)
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedInput(f"{name} has dtype {tensor.dtype}; expected integers: convert it with .long()")
    return tensor.long()


def as_features(value: Array, name: str, shape: str) -> Tensor:
    """Return an array of features: floating point of any precision, all finite."""
    tensor = as_tensor(value, name, shape)
    if not tensor.is_floating_point():
        raise UnsupportedInput(f"{name} has dtype {tensor.dtype}; expected floating point: convert it with .float()")
    check_finite(tensor, name, "images" if tensor.ndim > 2 else "rows")
    return tensor


def as_patches(value: Array, grid: tuple[int, ...], name: str = "features") -> tuple[Tensor, tuple[int, int, int]]:
    """Return patch features (B, P, D), without special tokens, and their grid as (t, h, w)."""
    features = as_features(value, name, "B P D")
    return features, as_grid(grid, features.shape[1])


def as_labels(value: Array, count: int) -> Tensor:
    """Return the labels of ``count`` images: integers from 0, of two classes or more."""
    labels = as_integers(value, "labels", str(count))
    if int(labels.min()) < 0:
        raise UnsupportedInput(
            f"{int((labels < 0).sum())} of {count} labels are negative, which often means unlabeled; "
            "remove these images, and number the classes from 0"
        )
    if int(labels.min()) == int(labels.max()):
        raise UnsupportedInput(f"all {count} labels are {int(labels[0])}; a probe needs images of two or more classes")
    return labels


def as_mask(value: Array, tokens: Tensor, name: str = "outliers") -> Tensor:
    """Return a bool mask of patches (B, P), on the device of their tokens (B, P, ...)."""
    mask = as_tensor(value, name, "B P")
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
        raise UnsupportedInput(
            f"{name} is {mask.dtype} of shape {tuple(mask.shape)}; "
            f"expected bool of shape {tuple(tokens.shape[:2])}, one per patch"
        )
    return mask.to(tokens.device)


def as_grid(grid: tuple[int, ...], patches: int | None = None) -> tuple[int, int, int]:
    """Return a grid as (time, height, width), and check that it has that many patches.

    >>> as_grid((3, 4)), as_grid((2, 3, 4), 24)
    ((1, 3, 4), (2, 3, 4))
    """
    if len(grid) not in (2, 3) or min(grid) < 1:
        raise InvalidOption(f"the grid is {grid}; expected (height, width) or (time, height, width), each 1 or more")
    if patches is not None and prod(grid) != patches:
        raise UnsupportedInput(
            f"a grid of {tuple(grid)} has {prod(grid)} patches; got {patches} tokens. "
            "Remove special tokens: tokens[:, layout.patches]"
        )
    time, height, width = (1, *grid) if len(grid) == 2 else grid
    return int(time), int(height), int(width)


def as_frame(grid: tuple[int, ...], patches: int) -> tuple[int, int]:
    """Return the grid of a single frame as (height, width)."""
    time, height, width = as_grid(grid, patches)
    if time != 1:
        raise UnsupportedInput(f"the grid {grid} has {time} frames; expected a single frame")
    return height, width


def check_finite(values: Tensor, name: str, each: str = "images") -> None:
    """Raise if a vector along the last axis holds a non-finite number.

    The error counts these vectors and names the rows of the first axis that have them; ``each`` names what a row is.
    """
    bad = map_chunks(lambda part: ~part.detach().isfinite().all(-1), values, values[:1].numel())
    if bad.any():
        bad = bad.reshape(len(values), -1)
        rows = bad.any(1).nonzero().flatten().tolist()
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise UnsupportedInput(
            f"{int(bad.sum())} of {bad.numel()} vectors in {name} are not finite, in {len(rows)} of {len(values)} "
            f"{each} (number {shown}); remove them, or record them in float32"
        )


def check_count(value: int, name: str, least: int = 1) -> int:
    """Return an integer of at least ``least``; raise for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidOption(f"{name} must be an integer, {least} or more; got {value!r}")
    return number


def check_share(value: float, name: str) -> None:
    """Raise unless a share is above 0 and below 1."""
    if not 0 < value < 1:
        raise InvalidOption(f"{name} must be above 0 and below 1; got {value!r}")


def patch_labels(masks: Tensor, grid: tuple[int, int], classes: int, valid: Tensor) -> Tensor:
    """Return the most common class of each patch: masks (B, H, W) to (B, P); −1 where no pixel is valid.

    Patches need not be a whole number of pixels. Ties go to the lowest class.
    """
    patches = grid[0] * grid[1]
    row, column = (_cell_of(*pair, masks.device) for pair in zip(grid, masks.shape[1:], strict=True))
    place = row[:, None] * grid[1] + column
    labels = []
    for part in chunks(len(masks), max(patches * classes, place.numel())):
        image = torch.arange(len(masks[part]), device=masks.device)[:, None, None]
        cell = (image * patches + place) * classes + masks[part]
        counts = cell[valid[part]].bincount(minlength=len(image) * patches * classes)
        most = counts.reshape(len(image), patches, classes).max(-1)
        labels.append(most.indices.masked_fill(most.values == 0, -1))
    return torch.cat(labels)


def patch_means(maps: Tensor, grid: tuple[int, int], valid: Tensor) -> Tensor:
    """Return the mean of the valid pixels of each patch: maps (B, H, W) to (B, P) in float64; NaN where none is valid.

    Sums are matrix products, rows first and columns second, which give the same bits each time.
    """
    down, across = (
        (_cell_of(cells, length, maps.device) == torch.arange(cells, device=maps.device)[:, None]).double()
        for cells, length in zip(grid, maps.shape[1:], strict=True)
    )
    means = []
    for part in chunks(len(maps), maps[0].numel()):
        values, known = torch.where(valid[part], maps[part], 0).double(), valid[part].double()
        means.append((down @ values @ across.T) / (down @ known @ across.T))
    return torch.cat(means).flatten(1)


def _cell_of(cells: int, length: int, device: torch.device) -> Tensor:
    """Return the cell of each pixel along one axis."""
    return torch.arange(length, device=device) * cells // length
