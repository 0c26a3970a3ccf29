"""The Audio Spectrogram Transformer of the transformers library, bare and with its head."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {
    "num_mel_bins": 24,
    "max_length": 40,
    "patch_size": 8,
    "frequency_stride": 5,
    "time_stride": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_labels": 5,
}


def ast(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small AST: 24 bands × 40 frames make 4 × 6 patches that overlap."""
    return kind(hf.ASTConfig(**{**SMALL, **options}, attn_implementation=attention))


SIZE, SHAPE = (24, 40), (40, 24)  # as a layout has them; as the model takes them, time first
OWN = {"frequency_stride": 8, "time_stride": 8, "qkv_bias": False}

CASES = by_name(
    [
        Case("ast", partial(ast, hf.ASTModel), SIZE, shape=SHAPE),
        Case("ast-head", partial(ast, hf.ASTForAudioClassification), SIZE, shape=SHAPE),
        Case("ast-apart", partial(ast, hf.ASTModel, **OWN), SIZE, shape=SHAPE),
        # The eager softmax runs in float32 in a model of any precision.
        Case("ast-eager", partial(ast, hf.ASTModel, "eager"), SIZE, shape=SHAPE, tolerance=1e-5, bit_equal=False),
    ]
)
