"""Positions of patches: resampled learned embeddings, sines and cosines, rotary embeddings.

A grid is (time, height, width). Images and spectrograms have one frame, and only two axes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROTARY_BASE = 100.0
"""Longest wavelength of rotary position, in patches over 2π; text, which is longer, uses 10,000."""


def coordinates(grid: tuple[int, int, int], axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the coordinates (P, axes) of the patches in patches, the last axis running fastest."""
    steps = [torch.arange(length, device=device, dtype=dtype) for length in grid[3 - axes :]]
    return torch.stack(torch.meshgrid(steps, indexing="ij"), -1).reshape(-1, axes)


def rotary_frequencies(head_width: int, axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the frequencies (axes, d / 2): each axis rotates its own channels; any rest is not rotated."""
    bands = head_width // 2 // axes
    exponents = torch.arange(bands, device=device, dtype=dtype) / bands
    waves = ROTARY_BASE**-exponents
    frequencies = torch.zeros(axes, head_width // 2, device=device, dtype=dtype)
    for axis in range(axes):
        frequencies[axis, axis * bands : (axis + 1) * bands] = waves
    return frequencies


def rotary_table(grid: tuple[int, int, int], head_width: int, axes: int, like: Tensor) -> Tensor:
    """Return sines and cosines (P, 2·d) of the patches, at least in float32; pairs are half a head apart."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = rotary_frequencies(head_width, axes, like.device, dtype)
    angle = coordinates(grid, axes, like.device, dtype) @ frequencies
    angle = torch.cat([angle, angle], -1)
    return torch.cat([angle.sin(), angle.cos()], -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the last P queries or keys of (B, H, N, d) by a table (P, 2·d); return all."""
    sine, cosine = table.chunk(2, -1)
    front = x.shape[-2] - table.shape[-2]
    patches = x[..., front:, :]
    left, right = patches.chunk(2, -1)
    rotated = patches * cosine + torch.cat([-right, left], -1) * sine
    return torch.cat([x[..., :front, :], rotated.to(x.dtype)], -2)


def sincos_table(grid: tuple[int, int, int], width: int, axes: int, like: Tensor) -> Tensor:
    """Return fixed positions (1, P, D): for each axis sines, then cosines, of wavelengths up to 10,000 · 2π patches."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    bands = width // 2 // axes
    waves = 10_000.0 ** -(torch.arange(bands, device=like.device, dtype=dtype) / bands)
    angle = coordinates(grid, axes, like.device, dtype).unsqueeze(-1) * waves
    table = torch.cat([angle.sin(), angle.cos()], -1).flatten(1)
    return F.pad(table, (0, width - table.shape[1])).to(like.dtype).unsqueeze(0)


def resample(positions: Tensor, old: tuple[int, int, int], new: tuple[int, int, int]) -> Tensor:
    """Resample learned positions (1, P, D) to another grid: bicubic with antialiasing in space, linear in time.

    Always computed in float32, as in timm, so that both libraries agree.
    """
    if old == new:
        return positions
    width = positions.shape[-1]
    volume = positions.float().reshape(*old, width).permute(0, 3, 1, 2)
    if old[1:] != new[1:]:
        volume = F.interpolate(volume, size=new[1:], mode="bicubic", antialias=True)
    if old[0] != new[0]:
        line = volume.flatten(1).t().unsqueeze(0)
        line = F.interpolate(line, size=new[0], mode="linear", align_corners=False)
        volume = line.squeeze(0).t().reshape(new[0], width, *new[1:])
    return volume.permute(0, 2, 3, 1).reshape(1, -1, width).to(positions.dtype)
