"""Takes DINOv3 ViT of the transformers library apart for the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Position, Recipe
from tests.oracle.models.timm_blocks import turn
from tests.oracle.models.transformers_vit import heads_of


def describe_dinov3(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """A DINOv3 without a head: a class token, registers, patches; each patch turns by its place in −2π … 2π."""
    step = model.config.patch_size
    height, width = images.shape[2] // step, images.shape[3] // step
    bands = model.config.hidden_size // model.config.num_attention_heads // 4
    periods = [model.config.rope_theta ** (band / bands) for band in range(bands)]

    def angles(at: Position) -> Tensor:
        both = [place / period for place in at for period in periods]
        return torch.tensor([*both, *both], dtype=images.dtype)

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = model.norm(x)
        return {"last_hidden_state": x, "pooler_output": x[:, 0]}

    places = [[2 * (i + 0.5) / height - 1, 2 * (j + 0.5) / width - 1] for i in range(height) for j in range(width)]
    radians = (2 * math.pi * torch.tensor(places, dtype=torch.float32)).tolist()  # the library's precision
    rotate = turn(angles, halves=True)
    return Recipe(
        tokens=model.embeddings(images, **call),
        prefix=1 + model.config.num_register_tokens,
        blocks=[_parts(layer, rotate) for layer in getattr(model, "model", model).layer],
        finish=finish,
        features=model.norm,
        positions=[(row, column) for row, column in radians],
    )


def _parts(layer: nn.Module, rotate: Any) -> Parts:
    attention = layer.attention
    width = attention.head_dim
    return Parts(
        scale=width**-0.5,
        q=heads_of(attention.q_proj, width),
        k=heads_of(attention.k_proj, width),
        v=heads_of(attention.v_proj, width),
        rotate=rotate,
        project=attention.o_proj,
        feed=layer.mlp,
        before_attend=layer.norm1,
        before_feed=layer.norm2,
        gain_attend=lambda x: x * layer.layer_scale1.lambda1,
        gain_feed=lambda x: x * layer.layer_scale2.lambda1,
    )
