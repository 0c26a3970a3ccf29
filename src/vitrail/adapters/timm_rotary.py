"""Rotary positions of timm's models as coordinates and frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.adapters.base import Rotary
from vitrail.errors import UnsupportedInput


def _axial(bands: Tensor) -> Tensor:
    """Frequencies (1, 1, 2, d / 2) of two axes that have one half of the channels each."""
    zero = torch.zeros_like(bands)
    return torch.stack([torch.cat([bands, zero]), torch.cat([zero, bands])])[None, None]


def _work_dtype(*buffers: Tensor | None) -> torch.dtype:
    dtype = next(buffer.dtype for buffer in buffers if buffer is not None)
    return torch.promote_types(dtype, torch.float32)


def _rotary_cat(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """``RotaryEmbeddingCat``: coordinates in patches or in −1 … 1, as EVA02 and PE use them."""
    reference = rope.pos_embed if rope.bands is None else rope.bands
    device, dtype = reference.device, _work_dtype(reference)
    bands = (_bands_cat(rope, device) if rope.bands is None else rope.bands).to(dtype)
    swap = rope.grid_indexing == "xy"
    shape = grid[::-1] if swap else grid
    if rope.in_pixels:
        axes = [torch.linspace(-1.0, 1.0, steps, device=device, dtype=dtype) for steps in shape]
    else:
        axes = [torch.arange(steps, device=device).to(dtype) + rope.grid_offset for steps in shape]
    if rope.ref_feat_shape is not None:
        wanted = rope.ref_feat_shape[::-1] if swap else rope.ref_feat_shape
        axes = [axis / steps * target for axis, steps, target in zip(axes, shape, wanted, strict=True)]
    positions = torch.stack(torch.meshgrid(axes, indexing=rope.grid_indexing), -1).flatten(0, 1)
    return Rotary(None if dropped else positions, _axial(bands), not getattr(rope, "rotate_half", False))


def _bands_cat(rope: Any, device: torch.device) -> Tensor:
    """Compute the frequencies where they are needed: a copy from the CPU cannot be recorded in a CUDA graph."""
    from timm.layers.pos_embed_sincos import freq_bands, pixel_freq_bands

    number = rope.dim // 4
    if rope.in_pixels:
        return pixel_freq_bands(number, float(rope.max_res), linear_bands=rope.linear_bands, device=device)
    return freq_bands(number, temperature=rope.temperature, step=1, device=device)


def _rotary_dinov3(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """``RotaryEmbeddingDinoV3``: coordinates in −1 … 1, augmented in training."""
    from timm.layers.pos_embed_sincos import make_coords_dinov3

    dtype = _work_dtype(rope.periods)
    frequencies = _axial(2 * torch.pi / rope.periods.to(dtype))
    if dropped or (rope.training and rope.aug_active):
        return Rotary(None, frequencies, not rope.rotate_half)
    positions = make_coords_dinov3(
        *grid,
        normalize_coords=rope.normalize_coords,
        grid_indexing=rope.grid_indexing,
        grid_offset=rope.grid_offset,
        device=rope.periods.device,
        dtype=dtype,
    )
    return Rotary(positions, frequencies, not rope.rotate_half)


def _rotary_mixed(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """``RotaryEmbeddingMixed``: learned directions, different in every layer and head."""
    from timm.layers.pos_embed_sincos import get_mixed_grid

    if dropped:
        raise UnsupportedInput(
            "this model drops patches in training and has mixed rotary position: where a patch came from is then "
            "not known; train it with patch_drop_rate=0, or merge in eval mode only"
        )
    dtype = _work_dtype(rope.freqs)
    axes = get_mixed_grid(list(grid), rope.grid_indexing, device=rope.freqs.device, dtype=dtype)
    return Rotary(torch.stack(axes, -1), rope.freqs.to(dtype).permute(1, 2, 0, 3), True)


ROTARY = {
    "RotaryEmbeddingCat": _rotary_cat,
    "RotaryEmbeddingDinoV3": _rotary_dinov3,
    "RotaryEmbeddingMixed": _rotary_mixed,
}
"""How to read each of timm's rotary modules, by class name: (module, grid, whether patches are dropped)."""
