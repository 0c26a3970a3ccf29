"""transformers: DINOv3 ViT, alone or as a backbone; registers, layer scale, and rotary position on the patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import BlockNames, NamedBlock
from vitrail.adapters.position import Position, Rotary, axial_frequencies
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.data.spec import MEAN, STD
from vitrail.tokens import Role, TokenLayout

_MODULE = f"{MODELS}.dinov3_vit.modeling_dinov3_vit"
_LAYER = NamedBlock(
    BlockNames(
        norm1="norm1",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        proj="attention.o_proj",
        norm2="norm2",
        mlp="mlp",
        heads="attention.num_heads",
        head_dim="attention.head_dim",
        attention="attention",
        after_attend=("layer_scale1", "drop_path"),
        after_feed=("layer_scale2", "drop_path"),
        scale="attention.scaling",
        attention_dropout="attention.dropout",
        tokens="hidden_states",
        arguments=(("attention_mask", "mask"), ("position_embeddings", "cos_sin")),
    )
)


class Dinov3Trunk(TransformersTrunk):
    """DINOv3 ViT; takes any size, and shifts its coordinates at random in training."""

    norm = "norm"
    interpolates = True
    block_classes: Mapping[type | str, BlockAdapter] = {f"{_MODULE}.DINOv3ViTLayer": _LAYER}
    mean, std = MEAN, STD

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(getattr(trunk, "model", trunk).layer)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        steps = trunk.embeddings.patch_embeddings.stride
        registers = (Role.REGISTER, trunk.config.num_register_tokens)
        return TokenLayout.of(Role.CLASS, registers, grid=(1, height // steps[0], width // steps[1]))

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        rope = trunk.rope_embeddings
        dtype = torch.promote_types(rope.inv_freq.dtype, torch.float32)
        frequencies = axial_frequencies(rope.inv_freq.to(dtype))
        config = trunk.config
        shifts = config.pos_embed_shift, config.pos_embed_jitter, config.pos_embed_rescale
        if rope.training and any(shift is not None for shift in shifts):
            return Rotary(None, frequencies, interleaved=False)
        # in float32 and in radians, as the model's own
        axes = [(torch.arange(steps, device=rope.inv_freq.device) + 0.5) / steps for steps in grid[1:]]
        places = 2.0 * torch.stack(torch.meshgrid(axes, indexing="ij"), -1).flatten(0, 1) - 1.0
        return Rotary((2 * torch.pi * places).to(dtype), frequencies, interleaved=False)


class Dinov3BackboneTrunk(Dinov3Trunk):
    """DINOv3 ViT as a backbone: its feature maps are the tokens between blocks."""

    exposes = True


TRUNKS: dict[str, TrunkAdapter] = {
    f"{_MODULE}.DINOv3ViTModel": Dinov3Trunk(),
    f"{_MODULE}.DINOv3ViTBackbone": Dinov3BackboneTrunk(),
}
