"""transformers: ViT, DeiT, I-JEPA, ViT-MSN, DINOv2 with and without registers, and TIPSv2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, parameters_by_role
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.data.spec import MEAN, STD
from vitrail.tokens import Role, TokenLayout, TokenSpan

VIT_NAMES = BlockNames(
    norm1="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    norm2="layernorm_after",
    mlp="mlp",
    heads="attention.num_attention_heads",
    head_dim="attention.head_dim",
    attention="attention",
    after_attend=("dropout",),
    after_feed=("dropout",),
    scale="attention.scaling",
    attention_dropout="attention.attention_dropout",
    tokens="hidden_states",
    arguments=(("attention_mask", "mask"),),
    dense=MlpNames(
        (
            "ViTMLP",
            "DeiTMLP",
            "IJepaMLP",
            "ViTMSNMLP",
            "ViTMAEMLP",
            "PixioMLP",
            "Dinov2MLP",
            "Dinov2WithRegistersMLP",
            "Tipsv2VisionMLP",
            "RadioMLP",
        ),
        act="mlp.activation_fn",
    ),
)
"""Names of the parts of a block of ViT, which many models share."""
DINOV2_NAMES = replace(
    VIT_NAMES,
    norm1="norm1",
    norm2="norm2",
    after_attend=("layer_scale1", "drop_path"),
    after_feed=("layer_scale2", "drop_path"),
)
"""Names of the parts of a block of DINOv2, with layer scale."""
# transformers before 5.18: attention and MLP are two modules deep, and the MLP adds its residual itself
VIT_NESTED_NAMES = replace(
    VIT_NAMES,
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    mlp=("intermediate", "output.dense"),
    heads="attention.attention.num_attention_heads",
    head_dim=None,
    proj_drop="attention.output.dropout",
    after_attend=(),
    after_feed=("output.dropout",),
    scale="attention.attention.scaling",
    attention_dropout="attention.attention.dropout_prob",
    dense=None,
)
"""The same in the older arrangement of modules."""
_DINOV2_NESTED = replace(
    VIT_NESTED_NAMES,
    norm1="norm1",
    norm2="norm2",
    mlp="mlp",
    after_attend=DINOV2_NAMES.after_attend,
    after_feed=DINOV2_NAMES.after_feed,
)
_DINOV2_LAYER = f"{MODELS}.dinov2.modeling_dinov2.Dinov2Layer"
_REGISTERS_LAYER = f"{MODELS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer"
_BLOCKS: dict[type | str, BlockAdapter] = {
    f"{MODELS}.vit.modeling_vit.ViTLayer": NamedBlock(VIT_NAMES),
    f"{MODELS}.deit.modeling_deit.DeiTLayer": NamedBlock(VIT_NAMES),
    f"{MODELS}.ijepa.modeling_ijepa.IJepaLayer": NamedBlock(VIT_NAMES),
    f"{MODELS}.vit_msn.modeling_vit_msn.ViTMSNLayer": NamedBlock(VIT_NAMES),
    _DINOV2_LAYER: NamedBlock(DINOV2_NAMES),
    _REGISTERS_LAYER: NamedBlock(DINOV2_NAMES),
    f"{MODELS}.tipsv2.modeling_tipsv2.Tipsv2VisionLayer": NamedBlock(DINOV2_NAMES),
}
_NESTED_BLOCKS: dict[type | str, BlockAdapter] = {
    **dict.fromkeys(_BLOCKS, NamedBlock(VIT_NESTED_NAMES)),
    **dict.fromkeys((_DINOV2_LAYER, _REGISTERS_LAYER), NamedBlock(_DINOV2_NESTED)),
}


class VitTrunk(TransformersTrunk):
    """ViT, DeiT and ViT-MSN."""

    block_classes: Mapping[type | str, BlockAdapter] = _BLOCKS
    nested_classes: Mapping[type | str, BlockAdapter] = _NESTED_BLOCKS


class IJepaTrunk(VitTrunk):
    """I-JEPA: patches alone."""

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        return TokenLayout.of(grid=super().layout(trunk, size).grid)


class Dinov2Trunk(VitTrunk):
    """DINOv2: any size without asking, and ImageNet's statistics."""

    interpolates = True
    mean, std = MEAN, STD


class Dinov2BackboneTrunk(Dinov2Trunk):
    """DINOv2 as a backbone: its feature maps are the tokens between blocks."""

    exposes = True


class Tipsv2Trunk(Dinov2Trunk):
    """TIPSv2: its registers are further class tokens, and images have values from 0 to 1."""

    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        more = trunk.config.num_register_tokens
        second = (TokenSpan(Role.CLASS, more, SECOND),) if more else ()
        return TokenLayout((TokenSpan(Role.CLASS), *second), super().layout(trunk, size).grid)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        found = parameters_by_role(trunk.embeddings, {Role.CLASS: "cls_token"})
        return {**found, (Role.CLASS, SECOND): trunk.embeddings.register_tokens}


class Tipsv2BackboneTrunk(Tipsv2Trunk):
    """TIPSv2 as a backbone."""

    exposes = True


SECOND = "second"
"""Name of the class tokens of TIPSv2 that were trained with synthetic captions."""

_DINOV2_MODULE = f"{MODELS}.dinov2.modeling_dinov2"
_REGISTERS_MODULE = f"{MODELS}.dinov2_with_registers.modeling_dinov2_with_registers"
TRUNKS: dict[str, TrunkAdapter] = {
    f"{MODELS}.vit.modeling_vit.ViTModel": VitTrunk(),
    f"{MODELS}.deit.modeling_deit.DeiTModel": VitTrunk(),
    f"{MODELS}.ijepa.modeling_ijepa.IJepaModel": IJepaTrunk(),
    f"{MODELS}.vit_msn.modeling_vit_msn.ViTMSNModel": VitTrunk(),
    f"{_DINOV2_MODULE}.Dinov2Model": Dinov2Trunk(),
    f"{_REGISTERS_MODULE}.Dinov2WithRegistersModel": Dinov2Trunk(),
    f"{_DINOV2_MODULE}.Dinov2Backbone": Dinov2BackboneTrunk(),
    f"{_REGISTERS_MODULE}.Dinov2WithRegistersBackbone": Dinov2BackboneTrunk(),
    f"{MODELS}.tipsv2.modeling_tipsv2.Tipsv2VisionModel": Tipsv2Trunk(),
    f"{MODELS}.tipsv2.modeling_tipsv2.Tipsv2VisionBackbone": Tipsv2BackboneTrunk(),
}
