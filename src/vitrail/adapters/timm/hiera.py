"""timm's ``Hiera``: attention inside mask units, then over all tokens; blocks that pool queries run as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.timm.windowed import TimmWindowedTrunk
from vitrail.adapters.windows import LayerWindows, Pooling, WindowedNamedBlock, Windows
from vitrail.errors import UnsupportedModel
from vitrail.tokens import TokenLayout

_HIERA = replace(
    TIMM_NAMES, heads="attn.heads", head_dim="attn.head_dim", q_norm=None, k_norm=None, proj_drop=None,
    attention_dropout=None,
)  # fmt: skip


class HieraBlock(WindowedNamedBlock):
    """A block of Hiera."""

    def windows(self, block: Any) -> Windows | None:
        return None if block.do_expand or block.attn.q_stride > 1 else self.units(block)

    def units(self, block: Any) -> Windows:
        """Return the windows of the tokens that enter a block."""
        attention = block.attn
        side = isqrt(attention.window_size * attention.q_stride)
        return Windows((side, side) if attention.use_mask_unit_attn else None)

    def pooling(self, block: Any) -> Pooling:
        """Return the cost of a block that runs as it is."""
        attention, shortcut = block.attn, 0 if block.proj is None else block.proj.weight.numel()
        return Pooling(
            self.units(block),
            isqrt(attention.q_stride),
            attention.qkv.weight.numel(),
            shortcut,
            attention.proj.weight.numel(),
            2 * block.dim_out,
            block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel(),
        )


_BLOCK = HieraBlock(_HIERA)


class TimmHiera(TimmWindowedTrunk):
    """``Hiera`` for images of one size."""

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        return known_block(block, {"timm.models.hiera.HieraBlock": _BLOCK})

    def check(self, trunk: Any) -> None:
        square = len(trunk.q_stride) == 2 and len({*trunk.q_stride}) == 1 and len({*trunk.mask_unit_size}) == 1
        if not square or len(trunk.tokens_spatial_shape) != 2:
            raise UnsupportedModel(
                f"Hiera with mask units of {tuple(trunk.mask_unit_size)} and strides of {tuple(trunk.q_stride)} is not "
                "supported; supported are images with square units and strides"
            )

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = trunk.tokens_spatial_shape
        if size is not None:
            height, width = (side // step for side, step in zip(size, trunk.patch_stride, strict=True))
        return TokenLayout.of(grid=(1, height, width))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        found, step, order = [], 1, trunk.unroll.schedule
        for block in trunk.blocks:
            pooling, windows = None, _BLOCK.windows(block)
            if windows is None:
                pooling = _BLOCK.pooling(block)
                step *= pooling.stride
                order = order[1:] if pooling.stride > 1 else order
            found.append(LayerWindows(step, windows, tuple(tuple(one) for one in order), pooling))
        return tuple(found)

    def resizes(self, trunk: Any) -> bool:
        return False

    def input_size(self, trunk: Any) -> tuple[int, ...]:
        pairs = zip(trunk.tokens_spatial_shape, trunk.patch_stride, strict=True)
        return tuple(side * step for side, step in pairs)
