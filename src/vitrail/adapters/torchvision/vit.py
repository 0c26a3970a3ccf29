"""torchvision: ``VisionTransformer``, whose attention is ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, known_block
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.tokens import Role, TokenLayout

_BLOCK = NamedBlock(
    BlockNames(
        norm1="ln_1",
        qkv="self_attention.in_proj_weight",
        proj="self_attention.out_proj",
        norm2="ln_2",
        mlp="mlp",
        heads="self_attention.num_heads",
        head_dim="self_attention.head_dim",
        attention="self_attention",
        after_attend=("dropout",),
        attention_dropout="self_attention.dropout",
        tokens="input",
        dense=MlpNames(("MLPBlock",), fc1="mlp.0", act="mlp.1", fc2="mlp.3", drops=("mlp.2", "mlp.4")),
    )
)
MODULE = "torchvision.models.vision_transformer"


class TorchvisionTrunk(TrunkAdapter):
    """``VisionTransformer``: a class token, and inputs of one size."""

    norm = "encoder.ln"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.encoder.layers)

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, {f"{MODULE}.EncoderBlock": _BLOCK})
        attention = block.self_attention
        if type(attention) is not nn.MultiheadAttention or attention.in_proj_weight is None:
            raise UnsupportedModel(
                f"attention of class {type(attention).__name__} is not supported in {type(block).__name__}; supported "
                "is nn.MultiheadAttention with one packed projection"
            )
        return adapter

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = size or (trunk.image_size, trunk.image_size)
        return TokenLayout.of(Role.CLASS, grid=(1, height // trunk.patch_size, width // trunk.patch_size))

    def resizes(self, trunk: Any) -> bool:
        return False

    def input_spec(self, trunk: Any) -> InputSpec:
        return InputSpec((trunk.image_size, trunk.image_size), MEAN, STD)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.conv_proj,)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {(Role.CLASS, ""): trunk.class_token}

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes
