"""DINOv3 ViT of the transformers library, bare and as a backbone."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_register_tokens": 4,
}


def dinov3(attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small DINOv3 with four registers."""
    return hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**{**SMALL, **options}, attn_implementation=attention))


SQUARE = (32, 32)

CASES = by_name(
    [
        Case("plain", dinov3, SQUARE),
        # Sides that float32 divides exactly, in which the library computes coordinates.
        Case("wide", partial(dinov3, use_gated_mlp=True, key_bias=True, num_register_tokens=3), (16, 64)),
        Case("eager", partial(dinov3, "eager", num_register_tokens=0, hidden_act="silu"), SQUARE, bit_equal=False),
    ]
)
