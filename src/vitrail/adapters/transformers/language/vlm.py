"""transformers: vision towers that exist only inside vision-language models: Idefics3, SmolVLM, InternVL.

LLaVA and PaliGemma have the towers of ``clip``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, DenseBlock, TrunkAdapter, is_plain
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock, find_part
from vitrail.adapters.transformers.clip import LAYER_NAMES, SiglipTrunk
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint, TransformersTrunk
from vitrail.data.spec import MEAN, STD


class IdeficsEntryPoint(TransformersEntryPoint):
    """Entry point of a tower that is called with a mask of the patches; one that hides none is dropped."""

    def forward(
        self,
        pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        hides = patch_attention_mask is not None and not bool(patch_attention_mask.all())
        mask = patch_attention_mask if hides else None
        return super().forward(pixel_values, *args, patch_attention_mask=mask, **kwargs)


class IdeficsTrunk(SiglipTrunk):
    """The towers of Idefics3 and SmolVLM: SigLIP with positions for any aspect ratio, and pixel shuffle behind it."""

    masks = ("attention_mask", "patch_attention_mask")
    block_classes = {  # noqa: RUF012
        f"{MODELS}.idefics3.modeling_idefics3.Idefics3EncoderLayer": NamedBlock(LAYER_NAMES),
        f"{MODELS}.smolvlm.modeling_smolvlm.SmolVLMEncoderLayer": NamedBlock(LAYER_NAMES),
    }

    def entry_points(self) -> type:
        return IdeficsEntryPoint


class InternVLBlock(NamedBlock):
    """A block of InternVL's tower, whose norms of queries and keys act on all heads together."""

    def project(self, block: nn.Module, h: Tensor) -> Tensor | Sequence[Tensor]:
        q, k, v = super().project(block, h)
        return find_part(block, "attention.q_norm")(q), find_part(block, "attention.k_norm")(k), v

    def dense(self, block: nn.Module) -> DenseBlock | None:
        norms = find_part(block, "attention.q_norm"), find_part(block, "attention.k_norm")
        return super().dense(block) if all(is_plain(norm, nn.Identity) for norm in norms) else None


class InternVLTrunk(TransformersTrunk):
    """InternVL's tower: a class token, layer scale, and pixel shuffle behind it."""

    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{MODELS}.internvl.modeling_internvl.InternVLVisionLayer": InternVLBlock(
            BlockNames(
                norm1="layernorm_before",
                qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                proj="attention.projection_layer",
                proj_drop="attention.projection_dropout",
                norm2="layernorm_after",
                mlp="mlp",
                heads="attention.num_heads",
                head_dim="attention.head_dim",
                attention="attention",
                after_attend=("lambda_1",),
                after_feed=("dropout", "lambda_2"),
                scale="attention.scale",
                attention_dropout="attention.attention_dropout",
                tokens="hidden_states",
                dense=MlpNames(("InternVLVisionMLP",), act="mlp.activation_fn"),
            )
        )
    }
    interpolates = True
    mean, std = MEAN, STD

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.encoder.layer)


TRUNKS: dict[str, TrunkAdapter] = {
    f"{MODELS}.idefics3.modeling_idefics3.Idefics3VisionTransformer": IdeficsTrunk(),
    f"{MODELS}.smolvlm.modeling_smolvlm.SmolVLMVisionTransformer": IdeficsTrunk(),
    f"{MODELS}.internvl.modeling_internvl.InternVLVisionModel": InternVLTrunk(),
}
