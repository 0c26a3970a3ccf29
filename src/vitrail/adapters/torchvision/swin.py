"""torchvision: ``SwinTransformer``, V1 and V2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, forward_class, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.position import Position
from vitrail.adapters.windows import (
    LayerWindows,
    Tile,
    WindowBias,
    WindowedNamedBlock,
    WindowedTrunk,
    Windows,
    network_cost,
    relative_index,
)
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.tokens import TokenLayout

MODULE = "torchvision.models.swin_transformer"
_NAMES = replace(
    TIMM_NAMES,
    q_norm=None,
    k_norm=None,
    proj_drop=None,
    after_attend=("stochastic_depth",),
    after_feed=("stochastic_depth",),
    attention_dropout="attn.attention_dropout",
    dense=None,
)


class SwinBlock(WindowedNamedBlock):
    """A block of Swin."""

    biased = True

    def windows(self, block: Any) -> Windows:
        attention = block.attn
        return Windows(tuple(attention.window_size), tuple(attention.shift_size), pads_first=True, small="unshifted")

    def window_position(self, block: Any, tile: Tile) -> Position:
        def between(layer: int) -> Tensor:
            table = self.table(block.attn)
            return table[relative_index(tile, table.device)].permute(2, 0, 1)

        return WindowBias(between)

    def table(self, attention: Any) -> Tensor:
        """Return the bias of each relative position (positions, H)."""
        return attention.relative_position_bias_table

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        return F.dropout(super().attend_output(block, attended, h), block.attn.dropout, block.attn.training)

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attn.qkv, block.attn.proj)


class SwinV2Block(SwinBlock):
    """A block of Swin V2: norms behind both halves, cosine attention, and a network that computes the position bias."""

    def table(self, attention: Any) -> Tensor:
        return 16 * attention.cpb_mlp(attention.relative_coords_table).flatten(0, 2).sigmoid()

    def project(self, block: Any, h: Tensor) -> Tensor:
        linear = block.attn.qkv
        if linear.bias is None:
            return linear(h)
        third = linear.bias.numel() // 3
        bias = torch.cat([linear.bias[:third], linear.bias.new_zeros(third), linear.bias[2 * third :]])
        return F.linear(h, linear.weight, bias)

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(block, h)
        scale = block.attn.logit_scale.clamp(max=math.log(100)).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v

    def position_network(self, block: Any) -> int:
        return network_cost(block.attn)

    def attention_scale(self, block: nn.Module) -> float:
        return 1.0


_BLOCKS: dict[type | str, BlockAdapter] = {
    f"{MODULE}.SwinTransformerBlock": SwinBlock(_NAMES),
    f"{MODULE}.SwinTransformerBlockV2": SwinV2Block(replace(_NAMES, post_norm=True)),
}
_ATTENTION = {"SwinTransformerBlock": "ShiftedWindowAttention", "SwinTransformerBlockV2": "ShiftedWindowAttentionV2"}


class TorchvisionSwin(WindowedTrunk):
    """``SwinTransformer``: no class token, and inputs of any size."""

    norm = "norm"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return [block for blocks, _ in self.stages(trunk) for block in blocks]

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, _BLOCKS)
        kind, wanted = forward_class(block.attn), _ATTENTION[forward_class(block).__name__]
        if (kind.__module__, kind.__name__) != (MODULE, wanted):
            raise UnsupportedModel(
                f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; supported "
                f"is {wanted}"
            )
        return adapter

    def stages(self, trunk: Any) -> list[tuple[nn.Sequential, nn.Module | None]]:
        """Return the blocks of each stage, and the patch merging in front of it."""
        parts = list(trunk.features)[1:]
        return [(parts[place], parts[place - 1] if place else None) for place in range(0, len(parts), 2)]

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        rows, columns = trunk.features[0][0].stride
        return TokenLayout.of(grid=(1, height // rows, width // columns))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(
            LayerWindows(2**stage, self.block_adapter(block).windows(block))  # type: ignore[attr-defined]
            for stage, (blocks, _) in enumerate(self.stages(trunk))
            for block in blocks
        )

    def resizes(self, trunk: Any) -> bool:
        return True

    def input_spec(self, trunk: Any) -> InputSpec:
        """Return the specification of torchvision's own weights; the model does not keep it."""
        side = 256 if "V2" in forward_class(self.blocks(trunk)[0]).__name__ else 224
        return InputSpec((side, side), MEAN, STD)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.features[0],)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        stages = enumerate(self.stages(trunk))
        return [(merging, 4**stage) for stage, (_, merging) in stages if merging is not None]

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes
