"""Prominence: how far a token's norm stands out from everything that content explains.

Artifacts arise in the model, token by token. A high norm that was there when the token entered the model, that its
neighbors share, or that its whole image has, is content. The prominence of a token is the smallest of three ratios:

- its norm to the median norm of its image,
- how much its norm has grown since it entered the first block, to the median growth in its image,
- its norm to the third largest norm among its eight neighbors.

An artifact stands out in each of them by about the same factor: a token at ten times its norm has ten times the
prominence. A patch that is bright from the embedding on, and an object whose patches move together, do not stand out in
one of them. All three compare within one image, so prominences of a stream can be counted batch by batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._arguments import fitting

RANK = 3
"""The neighbor that a token is compared with: up to two adjacent artifacts still stand out, but not a patch at the
corner of an object, which has three neighbors in it."""

SMALLEST = 1e-30
"""Norms are at least this where they divide."""


@fitting
def prominence(norms: Tensor, entry: Tensor | None = None, grid: tuple[int, int, int] | None = None) -> Tensor:
    """Return the prominence (B, P) of patches with these norms (B, P), in float64; NaN where a norm is not finite.

    Args:
        norms: norms of patches after one layer.
        entry: norms of the same patches when they entered the first block; without them growth is not compared.
        grid: (t, h, w) grid of the patches; without it neighbors are not compared.

    >>> norms = torch.ones(1, 16)
    >>> norms[0, 5] = 8
    >>> prominence(norms, grid=(1, 4, 4))[0, 5].item(), prominence(norms, entry=norms)[0, 5].item()
    (8.0, 1.0)
    """
    values = norms.detach().double()
    values = values.where(values.isfinite(), torch.nan)
    ratio = values / _median(values)
    if entry is not None:
        growth = values / entry.detach().double().clamp_min(SMALLEST)
        ratio = torch.fmin(ratio, growth / _median(growth))
    if grid is not None:
        ratio = torch.fmin(ratio, values / _among_neighbors(values, grid).clamp_min(SMALLEST))
    return ratio.where(values.isfinite(), torch.nan)


def _median(values: Tensor) -> Tensor:
    return values.nanmedian(1, keepdim=True).values.clamp_min(SMALLEST)


def _among_neighbors(values: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return the third largest value among each patch's eight neighbors (B, P); 0 for patches with fewer than three."""
    time, height, width = grid
    maps = F.pad(values.nan_to_num(0.0).reshape(-1, 1, height, width), (1, 1, 1, 1))
    around = F.unfold(maps, 3).reshape(-1, 9, height * width)
    others = torch.cat([around[:, :4], around[:, 5:]], 1)
    return others.topk(RANK, 1).values[:, -1].reshape(len(values), time * height * width)
