"""Takes the vision transformers of the transformers library apart for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Recipe, identity


def describe_transformers(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """A ViT, DeiT, Dinov2 or Dinov2WithRegisters, bare or with one of its classification heads."""
    base = model.base_model
    family = model.config.model_type
    layers = base.encoder.layer if hasattr(base, "encoder") else base.layers
    registers = model.config.num_register_tokens if family == "dinov2_with_registers" else 0
    prefix = {"vit": 1, "deit": 2, "dinov2": 1, "dinov2_with_registers": 1 + registers}[family]

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = base.layernorm(x)
        if model is base:
            outputs = {"last_hidden_state": x}
            if family.startswith("dinov2"):
                outputs["pooler_output"] = x[:, 0]
            elif base.pooler is not None:
                outputs["pooler_output"] = base.pooler(x)
            return outputs
        if family.startswith("dinov2"):
            return {"logits": model.classifier(torch.cat([x[:, 0], x[:, prefix:].mean(dim=1)], dim=1))}
        if hasattr(model, "distillation_classifier"):
            first, second = model.cls_classifier(x[:, 0]), model.distillation_classifier(x[:, 1])
            return {
                "logits": (first + second) / 2,
                "cls_logits": first,
                "distillation_logits": second,
            }
        return {"logits": model.classifier(x[:, 0])}

    return Recipe(
        tokens=base.embeddings(images, **call),
        prefix=prefix,
        blocks=[parts_of_layer(layer) for layer in layers],
        finish=finish,
        features=base.layernorm,
    )


def heads_of(linear: nn.Linear, width: int) -> Callable[[Tensor], Tensor]:
    """Return queries, keys or values of rows (N, D), as (N, H, d)."""

    def apply(x: Tensor) -> Tensor:
        y = x @ linear.weight.T
        if linear.bias is not None:
            y = y + linear.bias
        return y.reshape(len(x), -1, width)

    return apply


def _biased(heads: Callable[[Tensor], Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a projection with a bias that the attention holds itself: VideoMAE before transformers 5.10."""
    return heads if bias is None else lambda x: (heads(x).flatten(1) + bias).view_as(heads(x))


def parts_of_layer(layer: nn.Module) -> Parts:
    """Return the parts of a block with the names of ViT or DINOv2."""
    attention = layer.attention
    if hasattr(attention, "attention"):
        return _nested_parts(layer)
    width = attention.head_dim
    scaled = hasattr(layer, "layer_scale1")
    return Parts(
        scale=width**-0.5,
        q=heads_of(attention.q_proj, width),
        k=heads_of(attention.k_proj, width),
        v=heads_of(attention.v_proj, width),
        project=attention.o_proj,
        feed=layer.mlp,
        before_attend=layer.norm1 if scaled else layer.layernorm_before,
        before_feed=layer.norm2 if scaled else layer.layernorm_after,
        gain_attend=(lambda x: x * layer.layer_scale1.lambda1) if scaled else identity,
        gain_feed=(lambda x: x * layer.layer_scale2.lambda1) if scaled else identity,
    )


def _nested_parts(layer: nn.Module) -> Parts:
    """The same where attention holds a module of the same name: transformers before 5.18."""
    attention = layer.attention.attention
    width = attention.attention_head_size
    scaled = hasattr(layer, "layer_scale1")
    return Parts(
        scale=width**-0.5,
        q=_biased(heads_of(attention.query, width), getattr(attention, "q_bias", None)),
        k=heads_of(attention.key, width),
        v=_biased(heads_of(attention.value, width), getattr(attention, "v_bias", None)),
        project=layer.attention.output.dense,
        feed=layer.mlp if hasattr(layer, "mlp") else lambda x: layer.output.dense(layer.intermediate(x)),
        before_attend=layer.norm1 if hasattr(layer, "norm1") else layer.layernorm_before,
        before_feed=layer.norm2 if hasattr(layer, "norm2") else layer.layernorm_after,
        gain_attend=(lambda x: x * layer.layer_scale1.lambda1) if scaled else identity,
        gain_feed=(lambda x: x * layer.layer_scale2.lambda1) if scaled else identity,
    )
