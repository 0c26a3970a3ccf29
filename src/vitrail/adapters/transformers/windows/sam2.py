"""transformers: SAM 2's image encoder, a Hiera with windows in each stage; blocks that pool queries run as they are."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, known_block
from vitrail.adapters.named_block import BlockNames
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.adapters.transformers.windows.sam import DECODER
from vitrail.adapters.windows import LayerWindows, Pooling, WindowedNamedBlock, WindowedTrunk, Windows
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.sam2.modeling_sam2"
_SAM2 = BlockNames(
    norm1="layer_norm1",
    qkv="attn.qkv",
    proj="attn.proj",
    norm2="layer_norm2",
    mlp="mlp",
    heads="attn.num_attention_heads",
    attention="attn",
    scale="attn.scale",
    tokens="hidden_states",
)


class Sam2Block(WindowedNamedBlock):
    """A block of SAM 2's image encoder."""

    def windows(self, block: Any) -> Windows | None:
        return None if block.query_stride or block.dim != block.dim_out else self.entering(block)

    def entering(self, block: Any) -> Windows:
        """Return the windows of the tokens that enter a block."""
        return Windows((block.window_size, block.window_size) if block.window_size else None)

    def pooling(self, block: Any) -> Pooling:
        """Return the cost of a block that runs as it is."""
        return Pooling(
            self.entering(block),
            block.query_stride[0] if block.query_stride else 1,
            block.attn.qkv.weight.numel(),
            block.proj.weight.numel() if block.dim != block.dim_out else 0,
            block.attn.proj.weight.numel(),
            2 * block.dim_out,
            sum(one.weight.numel() for one in (block.mlp.proj_in, block.mlp.proj_out)),
        )


_BLOCK = Sam2Block(_SAM2)


class Sam2Trunk(WindowedTrunk, TransformersTrunk):
    """SAM 2's image encoder; its neck receives the whole grid of each stage."""

    block_classes = MappingProxyType({f"{_MODULE}.Sam2MultiScaleBlock": _BLOCK})
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        return known_block(block, self.block_classes)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        rows, columns = trunk.patch_embed.projection.stride
        return TokenLayout.of(grid=(1, -(-height // rows), -(-width // columns)))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        found, step = [], 1
        for block in trunk.blocks:
            windows, pooling = _BLOCK.windows(block), None
            if windows is None:
                pooling = _BLOCK.pooling(block)
                step *= pooling.stride
            found.append(LayerWindows(step, windows, (), pooling))
        return tuple(found)

    def token_parameters(self, trunk: Any) -> dict[Any, Any]:
        return {}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        """Return the convolutions of the neck, where there is one: one for each stage, the last one first."""
        necks: list[Any] = [
            one.neck for one in model.modules() if hasattr(one, "neck") and getattr(one, "backbone", None) is trunk
        ]
        steps = [self.layer_windows(trunk)[end].step for end in trunk.stage_ends]
        return [(conv, step * step) for neck in necks for conv, step in zip(neck.convs, reversed(steps), strict=True)]

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return [part for name, part in model.named_children() if name in DECODER or name.startswith("memory")]


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.Sam2HieraDetModel": Sam2Trunk()}
