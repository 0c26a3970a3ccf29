"""Takes torchvision's VisionTransformer apart for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from tests.oracle.core import Parts, Recipe


def describe_torchvision(model: VisionTransformer, images: Tensor) -> Recipe:
    """A class token, patches, learned positions; the head reads the class token."""
    patches = model.conv_proj(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), patches], 1)
    return Recipe(
        tokens=tokens + model.encoder.pos_embedding,
        prefix=1,
        blocks=[_parts(layer) for layer in model.encoder.layers],
        finish=lambda x: {"output": model.heads(model.encoder.ln(x)[:, 0])},
        features=model.encoder.ln,
    )


def _parts(layer: nn.Module) -> Parts:
    attention: nn.MultiheadAttention = layer.self_attention
    heads, width = attention.num_heads, attention.embed_dim // attention.num_heads
    q, k, v = (partial(_project, attention, place) for place in range(3))

    def split(project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: project(x).reshape(len(x), heads, width)

    return Parts(
        scale=width**-0.5,
        q=split(q),
        k=split(k),
        v=split(v),
        project=attention.out_proj,
        feed=layer.mlp,
        before_attend=layer.ln_1,
        before_feed=layer.ln_2,
    )


def _project(attention: nn.MultiheadAttention, place: int, x: Tensor) -> Tensor:
    """Queries, keys and values are rows of one weight, in this order."""
    rows = slice(place * attention.embed_dim, (place + 1) * attention.embed_dim)
    return x @ attention.in_proj_weight[rows].T + attention.in_proj_bias[rows]
