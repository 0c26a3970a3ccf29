"""timm's ``SwinTransformer`` and ``SwinTransformerV2``: shifted windows, and patch merging between stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, forward_class, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.position import Position
from vitrail.adapters.timm.windowed import TimmWindowedTrunk
from vitrail.adapters.windows import (
    LayerWindows,
    Tile,
    WindowBias,
    WindowedNamedBlock,
    Windows,
    network_cost,
    relative_index,
)
from vitrail.errors import UnsupportedModel

_SWIN = replace(
    TIMM_NAMES, q_norm=None, k_norm=None, after_attend=("drop_path1",), after_feed=("drop_path2",), dense=None
)


class SwinBlock(WindowedNamedBlock):
    """A block of Swin: a table of relative positions."""

    biased = True

    def windows(self, block: Any) -> Windows:
        return Windows(tuple(block.window_size), tuple(block.shift_size))

    def window_position(self, block: Any, tile: Tile) -> Position:
        attention = block.attn

        def between(layer: int) -> Tensor:
            table = attention.relative_position_bias_table
            return table[relative_index(tile, table.device)].permute(2, 0, 1)

        return WindowBias(between)


class SwinV2Block(SwinBlock):
    """A block of Swin V2: norms behind both halves, cosine attention, and a network that computes the position bias."""

    def window_position(self, block: Any, tile: Tile) -> Position:
        attention = block.attn

        def between(layer: int) -> Tensor:
            table = attention.cpb_mlp(attention.relative_coords_table).flatten(0, 2)
            return 16 * table[relative_index(tile, table.device)].permute(2, 0, 1).sigmoid()

        return WindowBias(between)

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attn.qkv, block.attn.proj)

    def project(self, block: Any, h: Tensor) -> Tensor:
        attention = block.attn
        if attention.q_bias is None:
            return attention.qkv(h)
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
        if attention.qkv_bias_separate:
            return attention.qkv(h) + bias
        return F.linear(h, weight=attention.qkv.weight, bias=bias)

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(block, h)
        scale = block.attn.logit_scale.clamp(max=math.log(100)).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v

    def position_network(self, block: Any) -> int:
        return network_cost(block.attn)

    def attention_scale(self, block: nn.Module) -> float:
        return 1.0


class TimmSwin(TimmWindowedTrunk):
    """``SwinTransformer``; inputs of one size, unless ``strict_img_size=False``."""

    norm = "norm"
    block_classes: Mapping[type | str, BlockAdapter] = MappingProxyType(
        {"timm.models.swin_transformer.SwinTransformerBlock": SwinBlock(_SWIN)}
    )
    attention = "timm.models.swin_transformer.WindowAttention"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return [block for stage in trunk.layers for block in stage.blocks]

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, self.block_classes)
        kind = forward_class(block.attn)
        if f"{kind.__module__}.{kind.__qualname__}" != self.attention:
            raise UnsupportedModel(
                f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; "
                f"supported is {self.attention.rpartition('.')[2]}"
            )
        return adapter

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        found, step = [], 1
        for stage in trunk.layers:
            step *= 1 if isinstance(stage.downsample, nn.Identity) else 2
            for block in stage.blocks:
                found.append(LayerWindows(step, self.block_adapter(block).windows(block)))  # type: ignore[attr-defined]
        return tuple(found)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        found, step = [], 1
        for stage in trunk.layers:
            if not isinstance(stage.downsample, nn.Identity):
                step *= 2
                found.append((stage.downsample, step * step))
        return found


class TimmSwinV2(TimmSwin):
    """``SwinTransformerV2``: the same outside."""

    block_classes = MappingProxyType(
        {"timm.models.swin_transformer_v2.SwinTransformerV2Block": SwinV2Block(replace(_SWIN, post_norm=True))}
    )
    attention = "timm.models.swin_transformer_v2.WindowAttention"
