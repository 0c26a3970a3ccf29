"""V-JEPA 2 of the transformers library, with its predictor and with a head."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers as hf
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {
    "crop_size": 16,
    "patch_size": 4,
    "frames_per_clip": 6,
    "tubelet_size": 2,
    "hidden_size": 32,
    "mlp_ratio": 1.5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_pooler_layers": 1,
    "pred_hidden_size": 16,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 1,
    "num_labels": 5,
}


def vjepa(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """Return a small V-JEPA 2 of 3 × 4 × 4 tubelets, whose heads have channels that do not turn."""
    return kind(hf.VJEPA2Config(**{**SMALL, **options}, attn_implementation=attention))


SIZE, SHAPE = (6, 16, 16), (6, 3, 16, 16)  # as a layout has them; as the model takes them, frames first
BARE = {"skip_predictor": True}

CASES = by_name(
    [
        Case("vjepa2", partial(vjepa, hf.VJEPA2Model), SIZE, shape=SHAPE, call=BARE),
        Case("vjepa2-long", partial(vjepa, hf.VJEPA2Model), (8, 16, 16), shape=(8, 3, 16, 16), call=BARE),
        Case("vjepa2-one-frame", partial(vjepa, hf.VJEPA2Model), (1, 16, 16), shape=(1, 3, 16, 16), call=BARE),
        Case("vjepa2-head", partial(vjepa, hf.VJEPA2ForVideoClassification), SIZE, shape=SHAPE),
        Case(
            "vjepa2-eager",
            partial(vjepa, hf.VJEPA2ForVideoClassification, "eager"),
            SIZE,
            shape=SHAPE,
            tolerance=1e-5,
            bit_equal=False,
        ),
    ]
)
