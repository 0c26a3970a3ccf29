"""Takes the vision tower of AIMv2 of the transformers library apart for the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Recipe
from tests.oracle.models.transformers_vit import heads_of


def describe_aimv2(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """A tower alone: patches, RMS norms, and one query that attends to all patches behind them."""

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = model.rms_norm(x)
        if not model.config.use_head:
            return {"last_hidden_state": x}
        return {"last_hidden_state": x, "pooler_output": _pool(model.head, x)}

    return Recipe(
        tokens=model.embeddings(images, **call),
        prefix=0,
        blocks=[_parts(layer) for layer in model.encoder.layers],
        finish=finish,
        features=model.rms_norm,
    )


def _pool(head: nn.Module, x: Tensor) -> Tensor:
    width = x.shape[-1] // head.num_heads
    keys, values = heads_of(head.k_proj, width), heads_of(head.v_proj, width)
    query = head.cls_token.view(head.num_heads, width)
    pooled = []
    for tokens in x:
        k, v = keys(tokens), values(tokens)
        shares = torch.softmax((k * query).sum(-1) * width**-0.5, 0)
        pooled.append((shares[..., None] * v).sum(0).flatten())
    return head.output_proj(torch.stack(pooled))


def _parts(layer: nn.Module) -> Parts:
    attention, mlp = layer.attention, layer.ffn
    width = attention.embed_dim // attention.num_heads

    def feed(x: Tensor) -> Tensor:
        gate = mlp.gate_proj(x)
        return mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(x))

    return Parts(
        scale=width**-0.5,
        q=heads_of(attention.q_proj, width),
        k=heads_of(attention.k_proj, width),
        v=heads_of(attention.v_proj, width),
        project=attention.out_proj,
        feed=feed,
        before_attend=layer.rms_norm1,
        before_feed=layer.rms_norm2,
    )
