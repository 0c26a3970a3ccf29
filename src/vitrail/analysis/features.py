"""Patch features: taken out of a sequence of tokens, checked, and shown as principal components.

Everything here runs without gradients, in float32 or better, over a few pictures at a time.

>>> torch.manual_seed(0)  # doctest: +ELLIPSIS
<...>
>>> pca_maps(torch.rand(2, 12, 8), (3, 4)).shape
torch.Size([2, 1, 3, 4, 3])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import Grid, check_finite, whole_grid
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import TokenLayout

WORK = 2**25
"""How many numbers one step over pictures may hold at once (128 MiB in float32)."""


def steps(pictures: int, each: int) -> Iterator[slice]:
    """Walk over pictures in steps that hold at most :data:`WORK` numbers, with ``each`` numbers a picture."""
    size = max(1, WORK // max(1, each))
    for start in range(0, pictures, size):
        yield slice(start, min(start + size, pictures))


def working(x: Tensor) -> Tensor:
    """Give a tensor without gradients and in float32 at least."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def check_patches(x: Tensor, grid: Grid, name: str = "features") -> tuple[int, int, int]:
    """Refuse features that are not (B, P, D), with one row a patch of the grid, all finite; give the whole grid."""
    whole = whole_grid(grid)
    if x.ndim != 3 or x.shape[1] != prod(whole) or 0 in x.shape:
        raise UnsupportedInput(
            f"the {name} must be (pictures, {prod(whole)} patches, channels) for a grid of {grid}, special tokens "
            f"left out, and not empty; got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise UnsupportedInput(f"the {name} must be floating-point numbers; got {x.dtype}")
    check_finite(x, name)
    return whole


def patch_features(x: Tensor, layout: TokenLayout) -> Tensor:
    """Take the patches of keys, queries or values (B, H, N, d), heads side by side: (B, P, H·d).

    Every special token is left out: class, distillation, register and task tokens alike. What is left of a
    register in the features of patches would be found as an "object".
    """
    if x.ndim != 4 or x.shape[2] != layout.num_tokens:
        raise UnsupportedInput(
            f"keys or values must be (pictures, heads, {layout.num_tokens} tokens, channels) for {layout}; "
            f"got {tuple(x.shape)}; merged tokens must be unmerged first"
        )
    return x.detach()[:, :, layout.patches].transpose(1, 2).flatten(2)


@dataclass(frozen=True, eq=False)
class Pca(Result):
    """Principal components of patch features, one basis for all pictures.

    Attributes:
        mean: (D,) what is taken off first.
        directions: (C, D) of length one, the strongest first; the largest entry of each is positive.
        explained: (C,) share of the whole variance along each direction.
        patches: how many patches the basis was fitted to.
        left_out: how many patches were left out of the fit.
    """

    mean: Tensor = field(metadata={"json": False})
    directions: Tensor = field(metadata={"json": False})
    explained: Tensor
    patches: int
    left_out: int

    @torch.no_grad()
    def project(self, features: Tensor) -> Tensor:
        """Give the coordinates of features (B, P, D) along the directions: (B, P, C)."""
        if features.shape[-1] != len(self.mean):
            raise UnsupportedInput(
                f"the basis was fitted to {len(self.mean)} channels; got features with {features.shape[-1]}"
            )
        out = features.new_empty(*features.shape[:-1], len(self.directions), dtype=self.directions.dtype)
        for part in steps(len(features), features[:1].numel()):
            out[part] = (working(features[part]) - self.mean) @ self.directions.T
        return out


@torch.no_grad()
def fit_pca(features: Tensor, *, components: int = 3, leave_out: Tensor | None = None) -> Pca:
    """Fit principal components to patch features (B, P, D) of all pictures together.

    Patches marked in ``leave_out`` (B, P) do not take part: a few outliers of ten times the usual norm would
    otherwise be the first component.
    """
    check_patches(features, (1, features.shape[1]) if features.ndim == 3 and features.shape[1] else (1, 1))
    channels = features.shape[2]
    if not 1 <= components <= channels:
        raise InvalidOption(f"components must be between 1 and the {channels} channels; got {components}")
    kept = _kept(features, leave_out)
    count = int(kept.sum())
    if count < 2:
        raise UnsupportedInput(
            f"principal components need 2 patches or more; {count} of {kept.numel()} are not left out"
        )
    parts = list(steps(len(features), features[:1].numel()))
    device = features.device
    total = torch.zeros(channels, dtype=torch.float64)
    for part in parts:
        total += working(features[part])[kept[part]].sum(0).cpu().double()
    work = torch.promote_types(features.dtype, torch.float32)
    mean = (total / count).to(device=device, dtype=work)
    spread = torch.zeros(channels, channels, dtype=torch.float64)
    for part in parts:
        centred = working(features[part])[kept[part]] - mean
        spread += (centred.T @ centred).cpu().double()
    values, vectors = torch.linalg.eigh(spread / (count - 1))
    directions = vectors.flip(1)[:, :components].T
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    strength = values.flip(0)[:components].clamp(min=0)
    whole = values.clamp(min=0).sum()
    explained = strength / whole if whole > 0 else torch.zeros_like(strength)
    return Pca(mean, directions.to(device=device, dtype=work), explained, count, kept.numel() - count)


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
    """Show patch features (B, P, D) as colours (B, t, h, w, components) between 0 and 1.

    One basis and one scale serve all pictures, so that a colour means the same in each. The percentiles of the
    coordinates become 0 and 1, and what lies beyond is clipped. Patches in ``leave_out`` (B, P) count neither for
    the basis nor for the scale, and are drawn with the rest. A coordinate that does not vary is 0.5 everywhere.

    A ``basis`` fitted before (:func:`fit_pca`) is taken as it is, with its own number of components.
    """
    time, height, width = check_patches(features, grid)
    low, high = percentiles
    if not 0 <= low < high <= 100:
        raise InvalidOption(f"percentiles must be two rising numbers between 0 and 100; got {percentiles}")
    basis = basis or fit_pca(features, components=components, leave_out=leave_out)
    places = basis.project(features)
    kept = _kept(features, leave_out)
    if not kept.any():
        raise UnsupportedInput("all patches are left out; colours need at least one patch for their scale")
    ends = np.percentile(places[kept].cpu().numpy(), [low, high], axis=0)
    bottom, top = (torch.from_numpy(np.asarray(end)).to(places) for end in ends)
    width_of = top - bottom
    flat = width_of <= 1e-6 * torch.maximum(top.abs(), bottom.abs())
    colours = ((places - bottom) / torch.where(flat, 1.0, width_of)).clamp(0, 1)
    colours = torch.where(flat, torch.full_like(colours, 0.5), colours)
    return colours.reshape(len(features), time, height, width, -1)


def _kept(features: Tensor, leave_out: Tensor | None) -> Tensor:
    if leave_out is None:
        return torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    if leave_out.shape != features.shape[:2] or leave_out.dtype != torch.bool:
        raise UnsupportedInput(
            f"patches to leave out are marked by booleans {tuple(features.shape[:2])}; "
            f"got {leave_out.dtype} {tuple(leave_out.shape)}"
        )
    return ~leave_out.to(features.device)
