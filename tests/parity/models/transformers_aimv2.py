"""The vision tower of AIMv2 of the transformers library."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from tests.parity.models.cases import Case, by_name
from tests.parity.models.transformers_clip import SMALL

SQUARE = (32, 32)
RMS = 1e-5
"""Its RMS norms compute in float32."""


def aimv2(**options: Any) -> nn.Module:
    """Return a small tower."""
    return hf.Aimv2VisionModel(hf.Aimv2VisionConfig(**{**SMALL, **options}, attn_implementation="sdpa"))


CASES = by_name(
    [
        Case("pooled", partial(aimv2, qkv_bias=True, mlp_bias=True), SQUARE, tolerance=RMS),
        Case("native", partial(aimv2, is_native=True, use_head=False), (24, 56), tolerance=RMS),
    ]
)
