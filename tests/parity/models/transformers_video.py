"""VideoMAE and ViViT of the transformers library, bare and with their heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {
    "image_size": 16,
    "num_frames": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_labels": 5,
}


def videomae(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small VideoMAE of 3 × 4 × 4 tubelets."""
    options = {**SMALL, "patch_size": 4, "tubelet_size": 2, **options}
    return kind(hf.VideoMAEConfig(**options, attn_implementation=attention))


def vivit(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small ViViT of 3 × 4 × 2 tubelets."""
    options = {**SMALL, "tubelet_size": [2, 4, 8], **options}
    return kind(hf.VivitConfig(**options, attn_implementation=attention))


SIZE, SHAPE = (6, 16, 16), (6, 3, 16, 16)  # as a layout has them; as the models take them, frames first
EAGER = {"tolerance": 1e-5, "bit_equal": False}

CASES = by_name(
    [
        Case("videomae", partial(videomae, hf.VideoMAEModel, use_mean_pooling=False), SIZE, shape=SHAPE),
        Case("videomae-head", partial(videomae, hf.VideoMAEForVideoClassification), SIZE, shape=SHAPE),
        Case("videomae-eager", partial(videomae, hf.VideoMAEModel, "eager"), SIZE, shape=SHAPE, **EAGER),
        Case("vivit", partial(vivit, hf.VivitModel), SIZE, shape=SHAPE),
        Case("vivit-head", partial(vivit, hf.VivitForVideoClassification), SIZE, shape=SHAPE),
        Case("vivit-eager", partial(vivit, hf.VivitModel, "eager"), SIZE, shape=SHAPE, **EAGER),
    ]
)
