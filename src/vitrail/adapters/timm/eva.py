"""timm's ``Eva`` (EVA02, DINOv3, PE): rotary position inside the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.position import Position, Rotary, axial_frequencies
from vitrail.adapters.timm.vit import POST_NORM, VIT_NAMES, TimmVisionTransformer
from vitrail.errors import UnsupportedInput, UnsupportedModel

_EVA = replace(
    VIT_NAMES,
    after_attend=("gamma_1", "drop_path1"),
    after_feed=("gamma_2", "drop_path2"),
    rotate_half="attn.rotate_half",
    prefix="attn.num_prefix_tokens",
    arguments=(("rope", "rope"), ("attn_mask", "mask"), ("is_causal", "causal")),
)


class EvaNamedBlock(NamedBlock):
    """A block of ``Eva``, whose projections may be packed or separate, with biases as separate parameters."""

    def project(self, block: Any, h: Tensor) -> Tensor | Sequence[Tensor]:
        attention = block.attn
        if attention.qkv is None:
            return attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)
        if getattr(attention, "q_bias", None) is None:
            return attention.qkv(h)
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        if attention.qkv_bias_separate:
            return attention.qkv(h) + bias
        return F.linear(h, attention.qkv.weight, bias)


_EVA_BLOCKS: dict[type | str, BlockAdapter] = {
    "timm.models.eva.EvaBlock": EvaNamedBlock(_EVA),
    "timm.models.eva.EvaBlockPostNorm": EvaNamedBlock(replace(_EVA, **POST_NORM)),
}


class TimmEva(TimmVisionTransformer):
    """``Eva``: the same outside, rotary position inside."""

    block_classes = _EVA_BLOCKS
    attention_classes = ("EvaAttention", "AttentionRope")

    def check(self, trunk: Any) -> None:
        if trunk.rope is not None and type(trunk.rope).__name__ not in ROTARY:
            raise UnsupportedModel(
                f"the rotary position {type(trunk.rope).__name__} of this Eva model is not supported; "
                f"supported are {', '.join(ROTARY)}"
            )

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position | None:
        if trunk.rope is None:
            return None
        dropped = trunk.training and trunk.patch_drop is not None
        return ROTARY[type(trunk.rope).__name__](trunk.rope, grid[1:], dropped)


def _work_dtype(buffer: Tensor) -> torch.dtype:
    return torch.promote_types(buffer.dtype, torch.float32)


def _rotary_cat(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingCat``: coordinates in patches or in −1 … 1, as EVA02 and PE use them."""
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
    return Rotary(None if dropped else positions, axial_frequencies(bands), not getattr(rope, "rotate_half", False))


def _bands_cat(rope: Any, device: torch.device) -> Tensor:
    """Compute the frequencies on their device: a copy from the CPU cannot be recorded in a CUDA graph."""
    from timm.layers.pos_embed_sincos import freq_bands, pixel_freq_bands

    number = rope.dim // 4
    if rope.in_pixels:
        return pixel_freq_bands(number, float(rope.max_res), linear_bands=rope.linear_bands, device=device)
    return freq_bands(number, temperature=rope.temperature, step=1, device=device)


def _rotary_dinov3(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingDinoV3``: coordinates in −1 … 1, augmented in training."""
    from timm.layers.pos_embed_sincos import make_coords_dinov3

    dtype = _work_dtype(rope.periods)
    frequencies = axial_frequencies(2 * torch.pi / rope.periods.to(dtype))
    if dropped or (rope.training and rope.aug_active):
        return Rotary(None, frequencies, not rope.rotate_half)
    options = {name: getattr(rope, name) for name in ("normalize_coords", "grid_indexing", "grid_offset")}
    positions = make_coords_dinov3(*grid, **options, device=rope.periods.device, dtype=dtype)
    return Rotary(positions, frequencies, not rope.rotate_half)


def _rotary_mixed(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingMixed``: learned directions, different in every layer and head."""
    from timm.layers.pos_embed_sincos import get_mixed_grid

    if dropped:
        raise UnsupportedInput(
            "this model drops patches in training and has mixed rotary position, which does not tell where a patch "
            "came from; train it with patch_drop_rate=0, or merge in eval mode only"
        )
    dtype = _work_dtype(rope.freqs)
    axes = get_mixed_grid(list(grid), rope.grid_indexing, device=rope.freqs.device, dtype=dtype)
    return Rotary(torch.stack(axes, -1), rope.freqs.to(dtype).permute(1, 2, 0, 3), True)


ROTARY = {
    "RotaryEmbeddingCat": _rotary_cat,
    "RotaryEmbeddingDinoV3": _rotary_dinov3,
    "RotaryEmbeddingMixed": _rotary_mixed,
}
"""Readers of timm's rotary modules, by class name: (module, grid, whether patches are dropped)."""
