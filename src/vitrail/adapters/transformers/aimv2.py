"""transformers: the vision tower of AIMv2, alone or beside its text tower: RMS norms, SwiGLU, patches alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.transformers.clip import LAYER_NAMES, ClipTrunk
from vitrail.adapters.transformers.trunk import MODELS
from vitrail.tokens import Role

_MODULE = f"{MODELS}.aimv2.modeling_aimv2"
_LAYER = NamedBlock(
    replace(
        LAYER_NAMES,
        norm1="rms_norm1",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        proj="attention.out_proj",
        norm2="rms_norm2",
        mlp="ffn",
        heads="attention.num_heads",
        head_dim="attention.head_dim",
        attention="attention",
        scale="attention.scale",
        attention_dropout="attention.dropout",
        dense=None,
    )
)


class Aimv2Trunk(ClipTrunk):
    """AIMv2's vision tower; native checkpoints take any size, the others their own alone."""

    norm = "rms_norm"
    block_classes: Mapping[type | str, BlockAdapter] = {f"{_MODULE}.Aimv2EncoderLayer": _LAYER}

    def special(self, trunk: Any) -> tuple[Role, ...]:
        return ()

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {}

    def resizes(self, trunk: Any) -> bool:
        return bool(trunk.config.is_native)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        pooling = (trunk.head.k_proj, trunk.head.v_proj) if trunk.use_head else ()
        return (trunk.embeddings.patch_embed, *pooling)


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.Aimv2VisionModel": Aimv2Trunk()}
