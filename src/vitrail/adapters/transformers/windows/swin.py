"""transformers: Swin, with shifted windows and patch merging between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import TrunkAdapter
from vitrail.adapters.named_block import BlockNames, find_part
from vitrail.adapters.position import Position
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint, TransformersTrunk
from vitrail.adapters.windows import (
    LayerWindows,
    Tile,
    WindowBias,
    WindowedNamedBlock,
    WindowedTrunk,
    Windows,
    relative_index,
)
from vitrail.errors import UnsupportedInput
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.swin.modeling_swin"
_SWIN = BlockNames(
    norm1="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    norm2="layernorm_after",
    mlp="mlp",
    heads="attention.num_attention_heads",
    head_dim="attention.head_dim",
    attention="attention",
    after_attend=("dropout", "drop_path"),
    after_feed=("dropout",),
    scale="attention.scaling",
    attention_dropout="attention.attention_dropout",
    tokens="hidden_states",
)
# transformers before 5.9: attention and MLP are two modules deep
_SWIN_NESTED = replace(
    _SWIN,
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    proj="attention.output.dense",
    mlp=("intermediate", "output.dense"),
    heads="attention.self.num_attention_heads",
    head_dim="attention.self.attention_head_size",
    proj_drop="attention.output.dropout",
    after_attend=("drop_path",),
    after_feed=("output.dropout",),
    scale=None,
    attention_dropout="attention.self.dropout",
)


class SwinBlock(WindowedNamedBlock):
    """A block of Swin; ``bias`` is the path of the module that holds its table of relative positions."""

    biased = True
    tuple_length = 2

    def __init__(self, names: BlockNames, bias: str) -> None:
        super().__init__(names)
        self.bias = bias

    def windows(self, block: Any) -> Windows:
        size, shift = int(block.window_size), int(block.shift_size)
        return Windows((size, size), (shift, shift), pads_first=True, small="shrunk")

    def window_position(self, block: Any, tile: Tile) -> Position:
        module = find_part(block, self.bias)
        if tile.window != tuple(module.window_size):
            raise UnsupportedInput(
                f"this input leaves a stage with a grid smaller than its windows of {tuple(module.window_size)}, for "
                "which transformers' Swin has no position bias; pass larger images"
            )

        def between(layer: int) -> Tensor:
            table = module.relative_position_bias_table
            return table[relative_index(tile, table.device)].permute(2, 0, 1)

        return WindowBias(between)


_BLOCK = SwinBlock(_SWIN, "attention.relative_position_bias")
_NESTED_BLOCK = SwinBlock(_SWIN_NESTED, "attention.self")


class SwinEntryPoint(TransformersEntryPoint):
    """Entry point of Swin; backbones keep the shift of windows that cover their grid."""

    def forward(self: Any, pixel_values: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        adapter = self._vitrail_adapter
        if kwargs.get("always_partition") and pixel_values is not None:
            adapter.refuse_small(self, tuple(pixel_values.shape[2:]))
        return super().forward(pixel_values, *args, **kwargs)


class SwinTrunk(WindowedTrunk, TransformersTrunk):
    """Swin, for images of any size."""

    block_classes = MappingProxyType({f"{_MODULE}.SwinLayer": _BLOCK})
    nested_classes = MappingProxyType({f"{_MODULE}.SwinLayer": _NESTED_BLOCK})
    interpolates = True
    masks = ()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return [block for stage in trunk.encoder.layers for block in stage.blocks]

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        rows, columns = trunk.embeddings.patch_embeddings.patch_size
        return TokenLayout.of(grid=(1, ceil(height / rows), ceil(width / columns)))

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        return tuple(
            LayerWindows(2**stage, _BLOCK.windows(block))
            for stage, layer in enumerate(trunk.encoder.layers)
            for block in layer.blocks
        )

    def refuse_small(self, trunk: Any, size: tuple[int, ...]) -> None:
        """Raise for an input that leaves a stage with a grid not larger than its windows."""
        patches = self.layout(trunk, size).grid
        for layer, one in zip(self.layer_windows(trunk), self.blocks(trunk), strict=True):
            block: Any = one
            if min(layer.grid(patches)) <= block.window_size:
                raise UnsupportedInput(
                    f"with images of {size[0]} × {size[1]}, a stage of this backbone has a grid of "
                    f"{layer.grid(patches)}, not larger than its windows: merging is not supported there; pass larger "
                    "images, or remove the merging"
                )

    def entry_points(self) -> type:
        return SwinEntryPoint

    def token_parameters(self, trunk: Any) -> dict[Any, Any]:
        return {}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings,)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        downsamples = [stage.downsample for stage in trunk.encoder.layers]
        return [(part, 4 ** (stage + 1)) for stage, part in enumerate(downsamples) if part is not None]


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.SwinModel": SwinTrunk()}
