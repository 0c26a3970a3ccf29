"""timm's ``VisionTransformer``: ViT, DeiT, DINOv2, CLIP and SigLIP towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import (
    BlockAdapter,
    TrunkAdapter,
    beside_tower,
    forward_class,
    known_block,
    parameters_by_role,
)
from vitrail.adapters.forward_pass import FeaturesEntry, IntermediatesEntry
from vitrail.adapters.named_block import TIMM_NAMES, MlpNames, NamedBlock
from vitrail.adapters.timm.parallel import SCALING, ParallelThingsNamedBlock
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.tokens import Role, TokenLayout

VIT_NAMES = replace(
    TIMM_NAMES,
    inner_norm="attn.norm",
    gate="attn.gate?",  # since timm 1.0.28
    arguments=(("attn_mask", "mask"), ("is_causal", "causal")),
    dense=MlpNames(("Mlp",), act="mlp.act", norm="mlp.norm", drops=("mlp.drop1", "mlp.drop2")),
)
POST_NORM: dict[str, Any] = {"post_norm": True, "after_attend": ("drop_path1",), "after_feed": ("drop_path2",)}

BLOCK = NamedBlock(VIT_NAMES)
"""The adapter of timm's ordinary ``Block``."""

_BLOCK_CLASS = "timm.models.vision_transformer.Block"
_VIT_BLOCKS: dict[type | str, BlockAdapter] = {
    _BLOCK_CLASS: BLOCK,
    "timm.models.vision_transformer.ResPostBlock": NamedBlock(replace(VIT_NAMES, **POST_NORM)),
    "timm.models.vision_transformer.ParallelScalingBlock": SCALING,
    "timm.models.vision_transformer.ParallelThingsBlock": ParallelThingsNamedBlock(VIT_NAMES),
}


class DiffNamedBlock(NamedBlock):
    """A block with differential attention: twice as many softmaxes as heads of values, in pairs to be subtracted.

    Each softmax counts a merged key by its size, as that of any other head.
    """

    fused = False  # values are twice as wide as keys

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, width = block.attn, block.attn.head_dim
        q, k, v = (part.unflatten(2, (-1, width)).transpose(1, 2) for part in attention.qkv(h).chunk(3, dim=2))
        pairs = v.transpose(1, 2).flatten(2).unflatten(2, (-1, 2 * width)).transpose(1, 2)
        return attention.q_norm(q), attention.k_norm(k), pairs.repeat_interleave(2, 1)

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        attention = block.attn
        first, second = attended.unflatten(2, (attention.num_heads, 2, 2 * attention.head_dim)).unbind(3)
        y = attention.sub_norm(first - attention._compute_lambda().type_as(first) * second)
        return super().attend_output(block, (y * (1 - attention.lambda_init)).flatten(2), h)

    def head_shape(self, block: Any) -> tuple[int, int]:
        return 2 * block.attn.num_heads, block.attn.head_dim

    def pair_weights(self, block: Any) -> int:
        return 2 * block.attn.num_heads * block.attn.head_dim


_DIFF_BLOCKS: dict[type | str, BlockAdapter] = {_BLOCK_CLASS: DiffNamedBlock(replace(VIT_NAMES, gate=None))}


class TimmEntryPoints(FeaturesEntry, IntermediatesEntry):
    """Entry points of a timm trunk."""


class TimmVisionTransformer(TrunkAdapter):
    """``VisionTransformer`` and its subclasses."""

    norm = "norm"
    block_classes: Mapping[type | str, BlockAdapter] = _VIT_BLOCKS
    attention_classes: tuple[str, ...] = ("Attention",)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, self.block_classes)
        # blocks of several attentions have them in a list, and those beside an MLP have none
        attentions = [block.attn] if hasattr(block, "attn") else [part.attn for part in getattr(block, "attns", ())]
        for attention in attentions:
            kind = forward_class(attention)
            if kind.__name__ == "DiffAttention" and adapter is BLOCK and kind.__module__.startswith("timm."):
                return known_block(block, _DIFF_BLOCKS)
            if kind.__name__ not in self.attention_classes or not kind.__module__.startswith("timm."):
                raise UnsupportedModel(
                    f"attention of class {type(attention).__name__} is not supported in {type(block).__name__}; "
                    f"supported are {', '.join(self.attention_classes)}"
                )
        return adapter

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        classes, distillation = (int(getattr(trunk, name, None) is not None) for name in ("cls_token", "dist_token"))
        registers = trunk.num_prefix_tokens - classes - distillation
        grid = trunk.patch_embed.grid_size if size is None else trunk.patch_embed.dynamic_feat_size(size)
        special = ((Role.CLASS, classes), (Role.DISTILLATION, distillation), (Role.REGISTER, registers))
        return TokenLayout.of(*special, grid=(1, *grid))

    def resizes(self, trunk: Any) -> bool:
        return trunk.dynamic_img_size

    def input_spec(self, trunk: Any) -> InputSpec:
        spec = declared(getattr(trunk, "pretrained_cfg", None) or {})
        return replace(spec, size=trunk.patch_embed.img_size or spec.size)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "dist_token", Role.REGISTER: "reg_token"}
        return parameters_by_role(trunk, names)

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes

    def entry_points(self) -> type:
        return TimmEntryPoints

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return beside_tower(model, trunk)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        pool = getattr(trunk.attn_pool, "kv", None)  # other poolings have no weights for patches
        return (trunk.patch_embed,) if pool is None else (trunk.patch_embed, pool)


def declared(config: Mapping[str, Any]) -> InputSpec:
    """Return the input specification of a ``pretrained_cfg``."""
    half = (0.5, 0.5, 0.5)
    return InputSpec(config.get("input_size", (3, 224, 224))[-2:], config.get("mean", half), config.get("std", half))
