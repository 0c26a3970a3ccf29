"""Takes the models of the transformers library with the blocks of ViT and DINOv2 apart for the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.oracle.core import Recipe, identity
from tests.oracle.models.transformers_vit import parts_of_layer


def describe_relative(model: PreTrainedModel, images: Tensor, **call: Any) -> Recipe:
    """An I-JEPA, ViT-MSN, ViT-MAE with all patches in order, Pixio, TIPSv2 or C-RADIO; the first two with a head."""
    base, config = model.base_model, model.config
    family = config.model_type
    prefix = {
        "ijepa": lambda: 0,
        "vit_msn": lambda: 1,
        "vit_mae": lambda: 1,
        "pixio": lambda: config.n_cls_tokens,
        "tipsv2_vision_model": lambda: 1 + config.num_register_tokens,
        "radio": lambda: config.num_cls_tokens + config.num_registers,
    }[family]()
    norm = getattr(base, "layernorm", identity)
    if family == "radio":
        tokens = base.embeddings(base.input_conditioner(images))
    elif family == "vit_mae":
        patches = images.shape[2] // config.patch_size * (images.shape[3] // config.patch_size)
        noise = torch.arange(patches).expand(len(images), -1)
        tokens, mask, restore = base.embeddings(images, noise=noise, **call)
    else:
        tokens = base.embeddings(images, **call)

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = norm(x)
        if model is not base:
            return {"logits": model.classifier(x.mean(1) if family == "ijepa" else x[:, 0])}
        more: dict[str, Tensor] = {}
        if family == "vit_mae":
            more = {"mask": mask, "ids_restore": restore}
        elif family == "pixio":
            more = {"pooler_output": x[:, :prefix].mean(1)}
        elif family == "tipsv2_vision_model":
            more = {"pooler_output": x[:, 0]}
        elif family == "radio":
            chosen = [x[:, index] for index in config.summary_idxs]
            more = {"summary": torch.cat(chosen, -1), "features": x[:, prefix:]}
        return {"last_hidden_state": x, **more}

    return Recipe(
        tokens=tokens,
        prefix=prefix,
        blocks=[parts_of_layer(layer) for layer in (base.encoder.layer if hasattr(base, "encoder") else base.layers)],
        finish=finish,
        features=norm,
    )
