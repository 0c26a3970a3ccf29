"""Pooling of pixel maps to the patch grid; patches need not be a whole number of pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.analysis._inputs import chunks


def patch_labels(masks: Tensor, grid: tuple[int, int], classes: int, valid: Tensor) -> Tensor:
    """Return the most common class of each patch: masks (B, H, W) to (B, P); −1 where no pixel is valid.

    Ties go to the lowest class.
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
