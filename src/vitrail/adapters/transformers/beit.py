"""transformers: BEiT and data2vec-vision, with a relative position bias of each block, shared among them, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall, TrunkAdapter
from vitrail.adapters.named_block import BlockNames, NamedBlock
from vitrail.adapters.position import Position, RelativeBias
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint, TransformersTrunk
from vitrail.errors import UnsupportedInput
from vitrail.tokens import Role, TokenLayout

_BEIT = BlockNames(
    norm1="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    norm2="layernorm_after",
    mlp="mlp",
    heads="attention.num_attention_heads",
    head_dim="attention.head_dim",
    attention="attention",
    after_attend=("dropout", "lambda_1", "drop_path"),
    after_feed=("dropout", "lambda_2", "drop_path"),
    scale="attention.scaling",
    attention_dropout="attention.attention_dropout",
    tokens="hidden_states",
    arguments=(("attention_mask", "mask"),),
)
_NESTED = replace(
    _BEIT,
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    mlp=("intermediate", "output"),
    heads="attention.attention.num_attention_heads",
    head_dim="attention.attention.attention_head_size",
    proj_drop="attention.output.dropout",
    after_attend=("lambda_1", "drop_path"),
    after_feed=("lambda_2", "drop_path"),
    scale=None,
    attention_dropout="attention.attention.dropout",
    arguments=(),
)
_BEIT_MODULE = f"{MODELS}.beit.modeling_beit"
_DATA2VEC_MODULE = f"{MODELS}.data2vec.modeling_data2vec_vision"


class BeitBlock(NamedBlock):
    """A block of BEiT, which is called with the shared bias as its mask; the trunk knows that bias."""

    biased = True

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return super().read_call(args, kwargs)._replace(mask=None)


class NestedBeitBlock(BeitBlock):
    """A block in the older arrangement of modules: attention is two modules deep, and it returns a tuple."""

    tuple_length = 2


class BeitEntryPoint(TransformersEntryPoint):
    """Entry point of BEiT, whose masks and position bias are one tensor."""

    def forward(self, pixel_values: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None or any(isinstance(value, Tensor) for value in args[2:]):
            raise UnsupportedInput(
                "BEiT adds its position bias to the attention mask, so a changed model takes no mask of the caller; "
                "call it without attention_mask, or remove the merging or the added tokens"
            )
        return super().forward(pixel_values, *args, **kwargs)


class BeitTrunk(TransformersTrunk):
    """BEiT and data2vec-vision: a class token, inputs of any size, and a relative position bias."""

    interpolates = True
    block_classes: Mapping[type | str, BlockAdapter] = {f"{_BEIT_MODULE}.BeitLayer": BeitBlock(_BEIT)}
    nested_classes: Mapping[type | str, BlockAdapter] = {
        f"{_DATA2VEC_MODULE}.Data2VecVisionLayer": NestedBeitBlock(_NESTED),
        f"{_BEIT_MODULE}.BeitLayer": NestedBeitBlock(_NESTED),  # transformers before 5.10
    }

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        patch = trunk.embeddings.patch_embeddings.projection.stride
        return TokenLayout.of(Role.CLASS, grid=(1, height // patch[0], width // patch[1]))

    def entry_points(self) -> type:
        return BeitEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings.projection,)

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        blocks, shared = self.blocks(trunk), self.shared_bias(trunk)

        def between(layer: int) -> Tensor | None:
            modules = (self.own_bias(blocks[layer]), shared)
            found = [module(grid[1:]) for module in modules if module is not None]
            return None if not found else found[0] if len(found) == 1 else found[0] + found[1]

        return RelativeBias(between)

    def own_bias(self, block: Any) -> nn.Module | None:
        """Return the module that computes a block's own bias; None where it has none."""
        nested = getattr(block.attention, "attention", None)
        return block.relative_position_bias if nested is None else getattr(nested, "relative_position_bias", None)

    def shared_bias(self, trunk: Any) -> nn.Module | None:
        """Return the module that computes the bias of all blocks; None where there is none."""
        encoder = getattr(trunk, "encoder", None)
        return trunk.shared_position_bias if encoder is None else getattr(encoder, "relative_position_bias", None)


TRUNKS: dict[str, TrunkAdapter] = {
    f"{_BEIT_MODULE}.BeitModel": BeitTrunk(),
    f"{_DATA2VEC_MODULE}.Data2VecVisionModel": BeitTrunk(),
}
