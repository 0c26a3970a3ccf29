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

_VIT_BLOCKS: dict[type | str, BlockAdapter] = {
    "timm.models.vision_transformer.Block": BLOCK,
    "timm.models.vision_transformer.ResPostBlock": NamedBlock(replace(VIT_NAMES, **POST_NORM)),
}


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
        attention = forward_class(block.attn)
        if attention.__name__ not in self.attention_classes or not attention.__module__.startswith("timm."):
            raise UnsupportedModel(
                f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; "
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
