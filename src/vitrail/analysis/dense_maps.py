"""From pixels to patches and back: what dense evaluations share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from vitrail.analysis.probes.inputs import CHUNK, as_grid
from vitrail.analysis.probes.linear import LinearMap
from vitrail.errors import UnsupportedInput


def patch_labels(masks: Tensor, grid: tuple[int, int], classes: int, valid: Tensor) -> Tensor:
    """Give the commonest class of each patch: masks (B, H, W) to (B, P); −1 where no pixel is valid.

    Of classes that are equally common, the lowest is taken.
    """
    patches = grid[0] * grid[1]
    # Pixel y of H lies in row ⌊y·h/H⌋ of h, so that patches need not be a whole number of pixels.
    row, column = (
        torch.arange(length, device=masks.device) * cells // length
        for cells, length in zip(grid, masks.shape[1:], strict=True)
    )
    place = row[:, None] * grid[1] + column
    labels = []
    step = _at_once(max(patches * classes, place.numel()))
    for part, known in zip(masks.split(step), valid.split(step), strict=True):
        picture = torch.arange(len(part), device=masks.device)[:, None, None]
        cell = (picture * patches + place) * classes + part
        counts = cell[known].bincount(minlength=len(part) * patches * classes).reshape(len(part), patches, classes)
        most = counts.max(-1)
        labels.append(most.indices.masked_fill(most.values == 0, -1))
    return torch.cat(labels)


def patch_means(maps: Tensor, grid: tuple[int, int], valid: Tensor) -> Tensor:
    """Give the mean of the valid pixels of each patch: maps (B, H, W) to (B, P) in float64; NaN where none is valid.

    Sums are matrix products, rows first and columns second, which give the same bits each time.
    """
    down, across = (_cells(cells, length, maps.device) for cells, length in zip(grid, maps.shape[1:], strict=True))
    means = []
    step = _at_once(maps[0].numel())
    for part, known in zip(maps.split(step), valid.split(step), strict=True):
        values = torch.where(known, part, 0).double()
        means.append((down @ values @ across.T) / (down @ known.double() @ across.T))
    return torch.cat(means).flatten(1)


def _cells(cells: int, length: int, device: torch.device) -> Tensor:
    """Give the matrix (cells, length) that sums the pixels of each cell along one axis."""
    member = torch.arange(length, device=device) * cells // length
    return (member == torch.arange(cells, device=device)[:, None]).double()


def score_maps(
    model: LinearMap, features: Tensor, pictures: Tensor, grid: tuple[int, int], size: tuple[int, int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Score pictures, some at a time: their indices (b,), and maps (b, K, H, W) upsampled bilinearly.

    Without a size, the maps keep the grid of the patches: (b, K, P).
    """
    outputs = len(model.bias)
    cells = size[0] * size[1] if size is not None else grid[0] * grid[1]
    for chosen in pictures.to(features.device).split(_at_once(max(outputs * cells, features[0].numel()))):
        scores = model.scores(features[chosen]).transpose(1, 2)  # (b, K, P)
        if size is not None:
            scores = interpolate(scores.unflatten(2, grid), size=size, mode="bilinear", align_corners=False)
        yield chosen, scores


def flat_grid(grid: tuple[int, ...], patches: int) -> tuple[int, int]:
    """Take a grid of pictures; the maps of videos are not evaluated."""
    frames, height, width = as_grid(grid, patches)
    if frames != 1:
        raise UnsupportedInput(
            f"the grid {grid} has {frames} time steps; dense evaluations take pictures, one at a time"
        )
    return height, width


def check_maps(maps: Tensor, features: Tensor, grid: tuple[int, int], name: str) -> tuple[int, int] | None:
    """Tell maps in pixels (B, H, W), whose size is given back, from maps in patches (B, P), which have none."""
    if len(maps) == len(features):
        if maps.ndim == 2 and maps.shape[1] == features.shape[1]:
            return None
        if maps.ndim == 3 and maps.shape[1] >= grid[0] and maps.shape[2] >= grid[1]:
            return maps.shape[1], maps.shape[2]
    raise UnsupportedInput(
        f"{name} of shape {tuple(maps.shape)} do not belong to features {tuple(features.shape)} on a grid {grid}; "
        "expected (B, H, W) in pixels, at least as fine as the grid, or (B, P) in patches"
    )


def _at_once(size: int) -> int:
    """How many pictures, each worth that many numbers, are worked on at a time."""
    return max(1, CHUNK // max(1, size))
