"""Where a patch is: learned positions at any size, sines and cosines, rotary position.

A grid is (time, height, width); pictures and spectrograms have one frame, and their time is not an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROTARY_BASE = 100.0
"""Slowest wave of rotary position, in patches over 2π: pictures are short, next to text with its 10 000."""


def coordinates(grid: tuple[int, int, int], axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Give the coordinates (P, axes) of the patches, counted in patches, the last axis running fastest."""
    steps = [torch.arange(length, device=device, dtype=dtype) for length in grid[3 - axes :]]
    return torch.stack(torch.meshgrid(steps, indexing="ij"), -1).reshape(-1, axes)


def rotary_frequencies(head_width: int, axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Give the frequencies (axes, d / 2): each axis turns channels of its own, and those left over stand still."""
    bands = head_width // 2 // axes
    exponents = torch.arange(bands, device=device, dtype=dtype) / bands
    waves = ROTARY_BASE**-exponents
    frequencies = torch.zeros(axes, head_width // 2, device=device, dtype=dtype)
    for axis in range(axes):
        frequencies[axis, axis * bands : (axis + 1) * bands] = waves
    return frequencies


def rotary_table(grid: tuple[int, int, int], head_width: int, axes: int, like: Tensor) -> Tensor:
    """Give sines and cosines (P, 2·d) of the patches, in float32 or better; pairs are half a head apart."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = rotary_frequencies(head_width, axes, like.device, dtype)
    angle = coordinates(grid, axes, like.device, dtype) @ frequencies
    angle = torch.cat([angle, angle], -1)
    return torch.cat([angle.sin(), angle.cos()], -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate queries or keys (B, H, N, d) of the last tokens, as many as the table (P, 2·d) has; others stay."""
    sine, cosine = table.chunk(2, -1)
    front = x.shape[-2] - table.shape[-2]
    patches = x[..., front:, :]
    left, right = patches.chunk(2, -1)
    turned = patches * cosine + torch.cat([-right, left], -1) * sine
    return torch.cat([x[..., :front, :], turned.to(x.dtype)], -2)


def sincos_table(grid: tuple[int, int, int], width: int, axes: int, like: Tensor) -> Tensor:
    """Give fixed positions (1, P, D): for each axis sines, then cosines, of waves up to 10 000 patches long."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    bands = width // 2 // axes
    waves = 10_000.0 ** -(torch.arange(bands, device=like.device, dtype=dtype) / bands)
    angle = coordinates(grid, axes, like.device, dtype).unsqueeze(-1) * waves
    table = torch.cat([angle.sin(), angle.cos()], -1).flatten(1)
    return F.pad(table, (0, width - table.shape[1])).to(like.dtype).unsqueeze(0)


def resample(positions: Tensor, old: tuple[int, int, int], new: tuple[int, int, int]) -> Tensor:
    """Bring learned positions (1, P, D) to another grid: bicubic with antialiasing in space, linear in time.

    Computed in float32 whatever the model's precision, as timm does, so that both give the same numbers.
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
