"""timm's ``VisionTransformerSAM``: windows, some blocks over all tokens, positions that depend on queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.timm.windowed import TimmWindowedTrunk
from vitrail.adapters.windows import DecomposedNamedBlock, LayerWindows, Windows
from vitrail.errors import UnsupportedModel


class SamBlock(DecomposedNamedBlock):
    """A block of SAM's image encoder."""

    def windows(self, block: Any) -> Windows:
        return Windows((block.window_size, block.window_size) if block.window_size else None)


_BLOCK = SamBlock(replace(TIMM_NAMES, dense=None))


class TimmSam(TimmWindowedTrunk):
    """``VisionTransformerSAM``; its neck receives the whole grid."""

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        return known_block(block, {"timm.models.vision_transformer_sam.Block": _BLOCK})

    def check(self, trunk: Any) -> None:
        if trunk.rope_global is not None:
            raise UnsupportedModel(
                "VisionTransformerSAM with rotary position is not supported: merged tokens have no place inside a "
                "window's table. Models with use_rope=False are"
            )

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(LayerWindows(1, _BLOCK.windows(block)) for block in trunk.blocks)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        return ((trunk.neck, 1),)
