"""Takes BEiT and data2vec-vision of the transformers library apart for the oracle."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Recipe, identity
from tests.oracle.models.timm_blocks import relative_bias
from tests.oracle.models.transformers_vit import heads_of


def describe_beit(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """A model alone, or with its classification head; windows are square, as for its own size."""
    base = model.base_model
    older = hasattr(base, "encoder")
    tokens = base.embeddings(images, **call)
    shared = getattr(base.encoder, "relative_position_bias", None) if older else base.shared_position_bias
    side = images.shape[-1] // model.config.patch_size

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = base.layernorm(x)
        pooler = base.pooler
        if pooler is None:
            return {"last_hidden_state": x}
        pooled = x[:, 0] if pooler.layernorm is None else pooler.layernorm(x[:, 1:].mean(1))
        if model is base:
            return {"last_hidden_state": x, "pooler_output": pooled}
        return {"logits": model.classifier(pooled)}

    return Recipe(
        tokens=tokens[0] if older else tokens,
        prefix=1,
        blocks=[_parts(layer, shared, side) for layer in (base.encoder.layer if older else base.layers)],
        finish=finish,
        features=base.layernorm,
    )


def _parts(layer: nn.Module, shared: nn.Module | None, side: int) -> Parts:
    attention = layer.attention
    older = hasattr(attention, "attention")
    if older:
        inside = attention.attention
        linears = inside.query, inside.key, inside.value, attention.output.dense
        own = getattr(inside, "relative_position_bias", None)
    else:
        linears = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        own = layer.relative_position_bias
    width = linears[3].in_features // layer_heads(layer)
    tables = [None if part is None else part.relative_position_bias_table for part in (own, shared)]

    def feed(x: Tensor) -> Tensor:
        return layer.output.dense(nn.functional.gelu(layer.intermediate.dense(x))) if older else layer.mlp(x)

    def gain(factor: Any) -> Any:
        return identity if factor is None else lambda x: x * factor

    return Parts(
        scale=width**-0.5,
        q=heads_of(linears[0], width),
        k=heads_of(linears[1], width),
        v=heads_of(linears[2], width),
        project=linears[3],
        feed=feed,
        before_attend=layer.layernorm_before,
        before_feed=layer.layernorm_after,
        gain_attend=gain(layer.lambda_1),
        gain_feed=gain(layer.lambda_2),
        bias=relative_bias(tables, side, side),
    )


def layer_heads(layer: nn.Module) -> int:
    """Return the number of heads of a layer."""
    inside = getattr(layer.attention, "attention", layer.attention)
    heads: int = inside.num_attention_heads
    return heads
