"""transformers: SAM's image encoder: windows, some blocks over all tokens, positions that depend on queries."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, known_block
from vitrail.adapters.named_block import BlockNames
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.adapters.windows import DecomposedNamedBlock, LayerWindows, WindowedTrunk, Windows
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.sam.modeling_sam"
_SAM = BlockNames(
    norm1="layer_norm1",
    qkv="attn.qkv",
    proj="attn.proj",
    norm2="layer_norm2",
    mlp="mlp",
    heads="attn.num_attention_heads",
    attention="attn",
    scale="attn.scale",
    attention_dropout="attn.dropout",
    tokens="hidden_states",
)
DECODER = ("prompt_encoder", "mask_decoder", "shared_image_embedding")
"""Attributes of the parts of a model that run for prompts, not for images."""


class SamBlock(DecomposedNamedBlock):
    """A block of SAM's image encoder."""

    def windows(self, block: Any) -> Windows:
        return Windows((block.window_size, block.window_size) if block.window_size else None)

    def attention_dropout(self, block: Any) -> float:
        # the fused attention of transformers leaves dropout out
        return 0.0 if "Sdpa" in type(block.attn).__name__ else super().attention_dropout(block)


_BLOCK = SamBlock(_SAM)


class SamTrunk(WindowedTrunk, TransformersTrunk):
    """SAM's image encoder, for images of one size; its neck receives the whole grid."""

    block_classes = MappingProxyType({f"{_MODULE}.SamVisionLayer": _BLOCK})
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def block_adapter(self, block: Any) -> BlockAdapter:
        return known_block(block, self.block_classes)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        rows, columns = trunk.patch_embed.patch_size
        return TokenLayout.of(grid=(1, height // rows, width // columns))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(LayerWindows(1, _BLOCK.windows(block)) for block in trunk.layers)

    def resizes(self, trunk: Any) -> bool:
        return False

    def token_parameters(self, trunk: Any) -> dict[Any, Any]:
        return {}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        return ((trunk.neck, 1),)

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return [part for name, part in model.named_children() if name in DECODER]


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.SamVisionEncoder": SamTrunk()}
