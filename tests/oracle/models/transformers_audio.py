"""Takes the Audio Spectrogram Transformer of the transformers library apart for the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.oracle.core import Recipe
from tests.oracle.models.transformers_vit import parts_of_layer


def describe_ast(model: PreTrainedModel, sounds: Tensor, **call: Any) -> Recipe:
    """An AST: patches cut out one by one, lowest band first; the mean of its two special tokens is pooled."""
    base, config = model.base_model, model.config
    layers = base.encoder.layer if hasattr(base, "encoder") else base.layers
    side, batch = config.patch_size, len(sounds)
    weight = base.embeddings.patch_embeddings.projection.weight.flatten(1)
    bias = base.embeddings.patch_embeddings.projection.bias
    patches = [
        sounds[:, time : time + side, band : band + side].mT.reshape(batch, -1) @ weight.T + bias
        for band in range(0, config.num_mel_bins - side + 1, config.frequency_stride)
        for time in range(0, config.max_length - side + 1, config.time_stride)
    ]
    special = [base.embeddings.cls_token, base.embeddings.distillation_token]
    tokens = torch.cat([*(token.expand(batch, -1, -1) for token in special), torch.stack(patches, 1)], 1)

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = base.layernorm(x)
        pooled = (x[:, 0] + x[:, 1]) / 2
        return (
            {"last_hidden_state": x, "pooler_output": pooled} if model is base else {"logits": model.classifier(pooled)}
        )

    return Recipe(
        tokens=tokens + base.embeddings.position_embeddings,
        prefix=2,
        blocks=[parts_of_layer(layer) for layer in layers],
        finish=finish,
        features=base.layernorm,
    )
