"""Takes V-JEPA 2 of the transformers library apart for the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Parts, Position, Recipe
from tests.oracle.models.transformers_video import tubelets
from tests.oracle.models.transformers_vit import heads_of


def describe_vjepa2(model: PreTrainedModel, clips: Tensor, **call: Any) -> Recipe:
    """The encoder without the predictor, bare or with a head: places are counted in the grid of the configuration."""
    base, config = model.base_model, model.config
    clips = clips.repeat(1, config.tubelet_size, 1, 1, 1) if clips.shape[1] < config.tubelet_size else clips
    tokens = tubelets(clips, base.encoder.embeddings.patch_embeddings.proj)
    side = config.crop_size // config.patch_size

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = base.encoder.layernorm(x)
        if model is base:
            return {"last_hidden_state": x, "masked_hidden_state": x}
        return {"logits": model.classifier(model.pooler(x))}

    places = [(float(i // side**2), float(i % side**2 // side), float(i % side)) for i in range(tokens.shape[1])]
    return Recipe(
        tokens=tokens,
        prefix=0,
        blocks=[_parts(layer) for layer in base.encoder.layer],
        finish=finish,
        features=base.encoder.layernorm,
        positions=places,
    )


def rotate(heads: Tensor, at: Position) -> Tensor:
    """Turn the heads (H, d) of a token: three thirds of the channels by frame, row and column, and the rest not."""
    width = heads.shape[-1] // 3 // 2 * 2
    rows = []
    for head in heads:
        turned = head.clone()
        for axis, place in enumerate(at):
            for channel in range(width):
                angle = torch.tensor(place / 10000 ** ((channel % (width // 2)) / (width / 2)), dtype=head.dtype)
                own = axis * width + channel
                partner, sign = (own + 1, -1.0) if channel % 2 == 0 else (own - 1, 1.0)
                turned[own] = head[own] * angle.cos() + sign * head[partner] * angle.sin()
        rows.append(turned)
    return torch.stack(rows)


def _parts(layer: nn.Module) -> Parts:
    attention = layer.attention
    width = attention.attention_head_size
    return Parts(
        scale=width**-0.5,
        q=heads_of(attention.query, width),
        k=heads_of(attention.key, width),
        v=heads_of(attention.value, width),
        rotate=rotate,
        project=attention.proj,
        feed=layer.mlp,
        before_attend=layer.norm1,
        before_feed=layer.norm2,
    )
