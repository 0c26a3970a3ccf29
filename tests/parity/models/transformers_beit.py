"""BEiT and data2vec-vision of the transformers library, bare and with their heads."""

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
    "num_labels": 5,
    "layer_scale_init_value": 0.1,
    "use_relative_position_bias": True,
}


def beit(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small BEiT or data2vec-vision."""
    return kind(kind.config_class(**{**SMALL, **options}, attn_implementation=attention))


SQUARE = (32, 32)
SHARED = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
NONE = {"use_relative_position_bias": False, "use_absolute_position_embeddings": True, "layer_scale_init_value": 0.0}
BOTH = {"use_shared_relative_position_bias": True, "use_mean_pooling": False}

CASES = by_name(
    [
        Case("own", partial(beit, hf.BeitModel), SQUARE),
        Case("shared", partial(beit, hf.BeitModel, **SHARED), SQUARE),
        Case("both", partial(beit, hf.BeitForImageClassification, **BOTH), SQUARE),
        Case("none", partial(beit, hf.BeitModel, **NONE), SQUARE),
        Case("eager", partial(beit, hf.BeitModel, "eager"), SQUARE, tolerance=1e-5, bit_equal=False),
        Case("data2vec", partial(beit, hf.Data2VecVisionModel), SQUARE),
        Case("data2vec-both", partial(beit, hf.Data2VecVisionForImageClassification, **BOTH), SQUARE),
        Case("data2vec-eager", partial(beit, hf.Data2VecVisionModel, "eager", **NONE), SQUARE, bit_equal=False),
    ]
)
