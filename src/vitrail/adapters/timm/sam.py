"""timm's ``VisionTransformerSAM``: windows, some blocks over all tokens, positions that depend on queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, known_block
from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.timm.vit import TimmEntryPoints, declared
from vitrail.adapters.windows import DecomposedNamedBlock, LayerWindows, WindowedTrunk, Windows
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.tokens import TokenLayout


class SamBlock(DecomposedNamedBlock):
    """A block of SAM's image encoder."""

    def windows(self, block: Any) -> Windows:
        return Windows((block.window_size, block.window_size) if block.window_size else None)


_BLOCK = SamBlock(replace(TIMM_NAMES, dense=None))


class TimmSam(WindowedTrunk):
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

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        grid = trunk.patch_embed.grid_size if size is None else trunk.patch_embed.dynamic_feat_size(size)
        return TokenLayout.of(grid=(1, *grid))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(LayerWindows(1, _BLOCK.windows(block)) for block in trunk.blocks)

    def resizes(self, trunk: Any) -> bool:
        return not trunk.patch_embed.strict_img_size

    def input_spec(self, trunk: Any) -> InputSpec:
        spec = declared(getattr(trunk, "pretrained_cfg", None) or {})
        return replace(spec, size=trunk.patch_embed.img_size or spec.size)

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes

    def entry_points(self) -> type:
        return TimmEntryPoints

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        return ((trunk.neck, 1),)
