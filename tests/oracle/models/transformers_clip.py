"""Takes the vision towers of CLIP and SigLIP of the transformers library apart for the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Recipe
from tests.oracle.models.transformers_vit import heads_of


def describe_clip(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """A tower alone, or with a projection or a classification head."""
    tower = getattr(model, "vision_model", model)
    is_clip = bool({"clip", "metaclip"} & set(model.config.model_type.split("_")))
    tokens = tower.embeddings(images, **call)
    if is_clip:
        tokens = tower.pre_layrnorm(tokens)
    prefix = int(is_clip)

    def finish(x: Tensor) -> dict[str, Tensor]:
        if hasattr(model, "classifier"):
            if not is_clip:
                x = tower.post_layernorm(x)
            return {"logits": model.classifier(x[:, prefix:].mean(dim=1))}
        if is_clip:
            pooled = tower.post_layernorm(x[:, 0])
            if hasattr(model, "visual_projection"):
                return {"image_embeds": model.visual_projection(pooled), "last_hidden_state": x}
            return {"last_hidden_state": x, "pooler_output": pooled}
        x = tower.post_layernorm(x)
        if not hasattr(tower, "head"):
            return {"last_hidden_state": x}
        return {"last_hidden_state": x, "pooler_output": attention_pool(tower.head, x)}

    return Recipe(
        tokens=tokens,
        prefix=prefix,
        blocks=[clip_parts(layer) for layer in tower.encoder.layers],
        finish=finish,
        features=tower.post_layernorm,
    )


def attention_pool(head: nn.Module, x: Tensor) -> Tensor:
    """One learned query attends to all tokens, head by head, and is fed."""
    attention, width = head.attention, x.shape[-1] // head.attention.num_heads
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    q = head.probe[0] @ weights[0].T + biases[0]
    k, v = (x @ weight.T + bias for weight, bias in zip(weights[1:], biases[1:], strict=True))
    pooled = []
    for h in range(attention.num_heads):
        some = slice(h * width, (h + 1) * width)
        shares = torch.softmax((k[..., some] * q[0, some]).sum(-1) * width**-0.5, -1)
        pooled.append((shares[..., None] * v[..., some]).sum(1))
    y = attention.out_proj(torch.cat(pooled, -1))
    return y + head.mlp(head.layernorm(y))


def clip_parts(layer: nn.Module) -> Parts:
    """Take a block apart."""
    attention = layer.self_attn
    width = attention.embed_dim // attention.num_heads
    return Parts(
        scale=width**-0.5,
        q=heads_of(attention.q_proj, width),
        k=heads_of(attention.k_proj, width),
        v=heads_of(attention.v_proj, width),
        project=attention.out_proj,
        feed=layer.mlp,
        before_attend=layer.layer_norm1,
        before_feed=layer.layer_norm2,
    )
