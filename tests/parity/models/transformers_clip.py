"""The vision towers of CLIP and SigLIP of the transformers library, bare and with their heads."""

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
}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tower(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small vision tower."""
    return kind(kind.config_class(**{**SMALL, **options}, attn_implementation=attention))


def with_text(kind: type[hf.PreTrainedModel], **options: Any) -> nn.Module:
    """Return a small model of both towers, or with a head on the vision tower."""
    vision, text = {**SMALL, **options}, {**TEXT, "projection_size": vision_width(options)}
    return kind(kind.config_class(text_config=text, vision_config=vision, num_labels=5, projection_dim=16))


def vision_width(options: dict[str, Any]) -> int:
    """Return the width of the vision tower, which SigLIP's text tower ends in."""
    width: int = {**SMALL, **options}["hidden_size"]
    return width


SQUARE = (32, 32)
INTERPOLATED = {"interpolate_pos_encoding": True}

CASES = by_name(
    [
        Case("tower", partial(tower, hf.CLIPVisionModel), SQUARE),
        Case("tower-even", partial(tower, hf.CLIPVisionModel, image_size=40, hidden_act="gelu"), (40, 40)),
        Case("tower-interpolated", partial(tower, hf.CLIPVisionModel), (24, 56), call=INTERPOLATED),
        # The eager softmax runs in float32 in a model of any precision.
        Case("tower-eager", partial(tower, hf.CLIPVisionModel, "eager"), SQUARE, tolerance=1e-5, bit_equal=False),
        Case("projection", partial(tower, hf.CLIPVisionModelWithProjection), SQUARE),
        Case("head", partial(with_text, hf.CLIPForImageClassification), SQUARE),
        Case("siglip", partial(tower, hf.SiglipVisionModel, num_attention_heads=1, hidden_size=72), SQUARE),
        Case("siglip-interpolated", partial(tower, hf.SiglipVisionModel), (24, 56), call=INTERPOLATED),
        Case("siglip-head", partial(with_text, hf.SiglipForImageClassification), SQUARE),
    ]
)
