"""Patch features: taken from keys or values, and their principal components (PCA).

Everything runs without gradients, in float32 or better, over a few images at a time.

>>> torch.manual_seed(0)  # doctest: +ELLIPSIS
<...>
>>> pca_maps(torch.rand(2, 12, 8), (3, 4)).shape
torch.Size([2, 1, 3, 4, 3])
"""

from __future__ import annotations

from dataclasses import field

import numpy as np
import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import (
    Grid,
    as_features,
    as_mask,
    as_patches,
    at_least_float32,
    check_shape,
    chunks,
    map_chunks,
)
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import TokenLayout


@fitting
def patch_features(x: Tensor, layout: TokenLayout) -> Tensor:
    """Return the patches of keys, queries or values (B, H, N, d), heads concatenated: (B, P, H·d).

    All special tokens are removed: object discovery would find a register as an "object".
    """
    check_shape(x, "keys or values", f"B H {layout.num_tokens} d", f", for {layout}. Unmerge merged tokens first")
    return x.detach()[:, :, layout.patches].transpose(1, 2).flatten(2)


class Pca(Result, eq=False):
    """Principal components of patch features, one basis for all images.

    Attributes:
        directions: (C, D) unit vectors, the strongest first; the largest entry of each is positive.
        patches, left_out: number of patches that the basis is fitted to, and of those left out.
    """

    mean: Tensor = field(metadata={"json": False})  # (D,) mean of the features
    directions: Tensor = field(metadata={"json": False})
    explained: Tensor  # (C,) share of the variance along each direction
    patches: int
    left_out: int

    @torch.no_grad()
    def project(self, features: Tensor) -> Tensor:
        """Return the coordinates of features (B, P, D) along the directions: (B, P, C)."""
        check_shape(features, "features", f"B P {len(self.mean)}", ", the channels that the basis was fitted to")
        return map_chunks(
            lambda part: (at_least_float32(part) - self.mean) @ self.directions.T, features, features[0].numel()
        )


@fitting
@torch.no_grad()
def fit_pca(features: Tensor, *, components: int = 3, leave_out: Tensor | None = None) -> Pca:
    """Fit principal components to patch features (B, P, D) of all images together.

    Patches in the mask ``leave_out`` (B, P) are ignored: a few outliers of ten times the usual norm would otherwise
    be the first component.
    """
    features = as_features(features, "features", "B P D")
    channels, device = features.shape[2], features.device
    if not 1 <= components <= channels:
        raise InvalidOption(f"components must be between 1 and the {channels} channels; got {components}")
    kept = _kept(features, leave_out)
    count = int(kept.sum())
    if count < 2:
        raise UnsupportedInput(f"PCA needs 2 or more patches; {count} of {kept.numel()} are not left out")
    parts = list(chunks(len(features), features[:1].numel()))
    total = torch.zeros(channels, dtype=torch.float64)
    for part in parts:
        total += at_least_float32(features[part])[kept[part]].sum(0).cpu().double()
    dtype = torch.promote_types(features.dtype, torch.float32)
    mean = (total / count).to(device=device, dtype=dtype)
    covariance = torch.zeros(channels, channels, dtype=torch.float64)
    for part in parts:
        centered = at_least_float32(features[part])[kept[part]] - mean
        covariance += (centered.T @ centered).cpu().double()
    values, vectors = torch.linalg.eigh(covariance / (count - 1))
    directions = vectors.flip(1)[:, :components].T
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    strength = values.flip(0)[:components].clamp(min=0)
    whole = values.clamp(min=0).sum()
    explained = strength / whole if whole > 0 else torch.zeros_like(strength)
    return Pca(mean, directions.to(device=device, dtype=dtype), explained, count, kept.numel() - count)


@fitting
@torch.no_grad()
def pca_maps(
    features: Tensor,
    grid: Grid,
    components: int = 3,
    *,
    leave_out: Tensor | None = None,
    basis: Pca | None = None,
    percentiles: tuple[float, float] = (1.0, 99.0),
) -> Tensor:
    """Return patch features (B, P, D) as colors (B, t, h, w, components) between 0 and 1.

    All images share one basis and one scale, so that a color means the same in each. The percentiles of the
    coordinates map to 0 and 1; values beyond are clipped. Patches in ``leave_out`` (B, P) do not influence basis and
    scale, but are drawn with the rest. A coordinate that does not vary is 0.5 everywhere.

    A given ``basis`` (:func:`fit_pca`) is used as is, with its own number of components.
    """
    features, shape = as_patches(features, grid)
    low, high = percentiles
    if not 0 <= low < high <= 100:
        raise InvalidOption(f"percentiles must be two rising numbers between 0 and 100; got {percentiles}")
    basis = basis or fit_pca(features, components=components, leave_out=leave_out)
    coordinates = basis.project(features)
    kept = _kept(features, leave_out)
    if not kept.any():
        raise UnsupportedInput("all patches are left out; colors need at least one patch for their scale")
    ends = np.percentile(coordinates[kept].cpu().numpy(), [low, high], axis=0)
    bottom, top = (torch.from_numpy(np.asarray(end)).to(coordinates) for end in ends)
    flat = top - bottom <= 1e-6 * torch.maximum(top.abs(), bottom.abs())
    colors = ((coordinates - bottom) / torch.where(flat, 1.0, top - bottom)).clamp(0, 1)
    return torch.where(flat, torch.full_like(colors, 0.5), colors).reshape(len(features), *shape, -1)


def _kept(features: Tensor, leave_out: Tensor | None) -> Tensor:
    if leave_out is None:
        return torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    return ~as_mask(leave_out, features, "leave_out")
