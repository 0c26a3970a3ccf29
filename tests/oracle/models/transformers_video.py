"""Takes VideoMAE and ViViT of the transformers library apart for the oracle."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.oracle.core import Recipe
from tests.oracle.models.transformers_vit import parts_of_layer


def tubelets(clips: Tensor, projection: nn.Conv3d) -> Tensor:
    """Cut clips (B, T, C, H, W) into tubelets one by one, first in time, then by rows, and project them."""
    steps, sizes = projection.kernel_size, (clips.shape[1], *clips.shape[3:])
    weight, found = projection.weight.flatten(1), []
    for t, y, x in product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        cut = clips[:, t : t + steps[0], :, y : y + steps[1], x : x + steps[2]].transpose(1, 2)
        found.append(cut.flatten(1) @ weight.T + projection.bias)
    return torch.stack(found, 1)


def describe_video(model: PreTrainedModel, clips: Tensor, **call: Any) -> Recipe:
    """A VideoMAE, with a mean over all patches behind it, or a ViViT, with a class token."""
    base = model.base_model
    layers = base.encoder.layer if hasattr(base, "encoder") else base.layers
    tokens = tubelets(clips, base.embeddings.patch_embeddings.projection)
    prefix = int(model.config.model_type == "vivit")
    if prefix:
        tokens = torch.cat([base.embeddings.cls_token.expand(len(clips), -1, -1), tokens], 1)
    norm = base.layernorm if base.layernorm is not None else lambda x: x

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = norm(x)
        if model is base:
            pooled = {"pooler_output": base.pooler(x)} if prefix else {}
            return {"last_hidden_state": x, **pooled}
        return {"logits": model.classifier(x[:, 0] if prefix else model.fc_norm(x.mean(1)))}

    return Recipe(
        tokens=tokens + base.embeddings.position_embeddings.to(tokens.dtype),
        prefix=prefix,
        blocks=[parts_of_layer(layer) for layer in layers],
        finish=finish,
        features=norm,
    )
