"""Small merged models to export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

import vitrail
from tests.parity.models.cases import redraw
from tests.parity.models.timm_eva import named as named_eva
from tests.parity.models.timm_vit import named, vit
from tests.parity.models.transformers_vit import build
from tests.parity.models.transformers_vit import vit as hf_vit
from tests.parity.models.windowed import timm_swin


@dataclass(frozen=True)
class Example:
    """A model with two blocks, its merging options, and the tokens that leave its blocks.

    Inside windows, these are the tokens that the MLPs work on.
    """

    make: Callable[[], nn.Module]
    tokens: list[int]
    outputs: dict[str, tuple[int | str, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def merged(self, seed: int = 3) -> nn.Module:
        model = self.make().eval()
        redraw(model, seed)
        vitrail.merge(model, **self.options)
        return model


LOGITS = {"logits": ("batch", 5)}
EXAMPLES = {
    "timm class token": Example(partial(vit, depth=2), [14, 11], {"output": ("batch", 5)}, {"r": 3}),
    "timm registers": Example(
        partial(vit, depth=2, reg_tokens=4, no_embed_class=True, init_values=1.0),
        [18, 15],
        {"output": ("batch", 5)},
        {"r": 3, "order": "original"},
    ),
    "timm SigLIP": Example(
        partial(named, "vit_base_patch16_siglip_224", depth=2, num_classes=0),
        [16, 12],
        {"output": ("batch", 32)},
        {"r": [0, 4]},
    ),
    "timm DINOv3": Example(
        partial(named_eva, "vit_small_patch16_dinov3", depth=2), [17, 13], {"output": ("batch", 5)}, {"keep": 0.5}
    ),
    "timm Swin": Example(partial(timm_swin, depths=(1, 1)), [52, 13], {"output": ("batch", 5)}, {"r": 3}),
    "transformers ViT": Example(
        partial(hf_vit, hf.ViTForImageClassification, num_hidden_layers=2),
        [14, 11],
        LOGITS,
        {"r": 3, "proportional": False},
    ),
    "transformers DeiT": Example(
        partial(hf_vit, hf.DeiTForImageClassification, num_hidden_layers=2),
        [14, 10],
        LOGITS,
        {"keep": 0.5, "order": "original"},
    ),
    "transformers DINOv2 with registers": Example(
        partial(build, hf.Dinov2WithRegistersModel, num_register_tokens=4, num_hidden_layers=2),
        [18, 15],
        {"last_hidden_state": ("batch", 21, 32), "pooler_output": ("batch", 32)},
        {"r": 3},
    ),
}


def random_images(count: int, seed: int = 11) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
