"""transformers: ViTDet: windows, some blocks over all tokens, and some that end in a residual convolution."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from vitrail.adapters.base import TrunkAdapter
from vitrail.adapters.named_block import BlockNames
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.adapters.windows import DecomposedNamedBlock, LayerWindows, Pooling, WindowedTrunk, Windows
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.vitdet.modeling_vitdet"
_VITDET = BlockNames(
    norm1="norm1",
    qkv="attention.qkv",
    proj="attention.proj",
    norm2="norm2",
    mlp="mlp",
    heads="attention.num_heads",
    attention="attention",
    scale="attention.scale",
    after_attend=("drop_path",),
    after_feed=("drop_path",),
    tokens="hidden_states",
)


class VitDetBlock(DecomposedNamedBlock):
    """A block of ViTDet."""

    channels_first = True
    tuple_length = 1

    def windows(self, block: Any) -> Windows | None:
        return None if block.use_residual_block else self.entering(block)

    def entering(self, block: Any) -> Windows:
        """Return the windows of the tokens that enter a block."""
        return Windows((block.window_size, block.window_size) if block.window_size else None)

    def pooling(self, block: Any) -> Pooling | None:
        """Return the cost of a block that runs as it is, with a residual convolution behind its MLP."""
        if not block.use_residual_block:
            return None
        parts = (block.mlp.fc1, block.mlp.fc2, block.residual.conv1, block.residual.conv2, block.residual.conv3)
        qkv, proj, pair = (
            block.attention.qkv.weight.numel(),
            block.attention.proj.weight.numel(),
            2 * block.norm1.weight.numel(),
        )
        feed = sum(part.weight.numel() for part in parts)
        return Pooling(self.entering(block), 1, qkv, 0, proj, pair, feed, rows=self.row_weights(block))


_BLOCK = VitDetBlock(_VITDET)


class VitDetTrunk(WindowedTrunk, TransformersTrunk):
    """``VitDetModel``, for images of one size."""

    norm = ""
    block_classes = MappingProxyType({f"{_MODULE}.VitDetLayer": _BLOCK})
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        rows, columns = trunk.embeddings.patch_size
        return TokenLayout.of(grid=(1, height // rows, width // columns))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(
            LayerWindows(1, _BLOCK.windows(block), pooling=_BLOCK.pooling(block)) for block in self.blocks(trunk)
        )

    def token_parameters(self, trunk: Any) -> dict[Any, Any]:
        return {}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.projection,)


class VitDetBackboneTrunk(VitDetTrunk):
    """``VitDetBackbone``, which reads the tokens between blocks."""

    exposes = True


TRUNKS: dict[str, TrunkAdapter] = {
    f"{_MODULE}.VitDetModel": VitDetTrunk(),
    f"{_MODULE}.VitDetBackbone": VitDetBackboneTrunk(),
}
