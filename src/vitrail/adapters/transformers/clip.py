"""transformers: the vision towers of CLIP, MetaCLIP 2, SigLIP and SigLIP 2, alone or beside text or a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.tokens import Role, TokenLayout

LAYER_NAMES = BlockNames(
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    mlp="mlp",
    heads="self_attn.num_heads",
    head_dim="self_attn.head_dim",
    attention="self_attn",
    scale="self_attn.scale",
    attention_dropout="self_attn.dropout",
    tokens="hidden_states",
    arguments=(("attention_mask", "mask"),),
    dense=MlpNames(
        ("CLIPMLP", "MetaClip2MLP", "SiglipMLP", "Siglip2MLP", "Idefics3VisionMLP", "SmolVLMVisionMLP"),
        act="mlp.activation_fn",
    ),
)
"""Names of the parts of a block of CLIP, which many towers share."""
_LAYER = NamedBlock(LAYER_NAMES)


class ClipTrunk(TransformersTrunk):
    """The vision tower of CLIP and MetaCLIP 2: a class token, and a norm before the blocks."""

    norm = "post_layernorm"
    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{MODELS}.clip.modeling_clip.CLIPEncoderLayer": _LAYER,
        f"{MODELS}.metaclip_2.modeling_metaclip_2.MetaClip2EncoderLayer": _LAYER,
    }
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.encoder.layers)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        patch = trunk.config.patch_size
        return TokenLayout.of(*self.special(trunk), grid=(1, height // patch, width // patch))

    def special(self, trunk: Any) -> tuple[Role, ...]:
        """Return the roles of the tokens in front of the patches."""
        return (Role.CLASS,)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {(Role.CLASS, ""): trunk.embeddings.class_embedding.view(1, 1, -1)}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embedding,)


class SiglipTrunk(ClipTrunk):
    """SigLIP's vision tower: patches alone, and attention pooling behind them."""

    block_classes = {f"{MODELS}.siglip.modeling_siglip.SiglipEncoderLayer": _LAYER}  # noqa: RUF012
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def special(self, trunk: Any) -> tuple[Role, ...]:
        return ()

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {}

    def pooled_weights(self, trunk: Any) -> int:
        """Count keys and values of the pooling, whose projection is packed with that of its one query."""
        pooling = getattr(trunk, "head", None)
        return 0 if pooling is None else pooling.attention.in_proj_weight.numel() // 3 * 2


TRUNKS: dict[str, TrunkAdapter] = {
    f"{MODELS}.clip.modeling_clip.CLIPVisionModel": ClipTrunk(),
    f"{MODELS}.metaclip_2.modeling_metaclip_2.MetaClip2VisionModel": ClipTrunk(),
    f"{MODELS}.siglip.modeling_siglip.SiglipVisionModel": SiglipTrunk(),
    # transformers before 5.6
    f"{MODELS}.clip.modeling_clip.CLIPVisionTransformer": ClipTrunk(),
    f"{MODELS}.metaclip_2.modeling_metaclip_2.MetaClip2VisionTransformer": ClipTrunk(),
    f"{MODELS}.siglip.modeling_siglip.SiglipVisionTransformer": SiglipTrunk(),
}
