"""timm's ``VisionTransformerRelPos``: a relative position bias from a table or an MLP, of each block or shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.named_block import TIMM_NAMES, NamedBlock
from vitrail.adapters.position import Position, RelativeBias
from vitrail.adapters.timm.vit import POST_NORM, TimmVisionTransformer

_NAMES = replace(TIMM_NAMES, arguments=(("shared_rel_pos", "bias"),), dense=None)


class RelPosNamedBlock(NamedBlock):
    """A block whose bias is read by the trunk, which may share one among all blocks."""

    biased = True


class TimmRelPos(TimmVisionTransformer):
    """``VisionTransformerRelPos``: inputs of one size, with or without a class token."""

    block_classes: Mapping[type | str, BlockAdapter] = {
        "timm.models.vision_transformer_relpos.RelPosBlock": RelPosNamedBlock(_NAMES),
        "timm.models.vision_transformer_relpos.ResPostRelPosBlock": RelPosNamedBlock(replace(_NAMES, **POST_NORM)),
    }
    attention_classes = ("RelPosAttention",)

    def resizes(self, trunk: Any) -> bool:
        return False

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        def between(layer: int) -> Tensor | None:
            module = trunk.blocks[layer].attn.rel_pos
            module = trunk.shared_rel_pos if module is None else module
            return None if module is None else module.get_bias()

        return RelativeBias(between)
