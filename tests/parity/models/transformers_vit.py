"""ViT, DeiT, Dinov2 and Dinov2WithRegisters of the transformers library, bare and with their heads."""

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
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_labels": 5,
}


def build(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """A small model of a class, from its own kind of configuration."""
    config = kind.config_class(**{**SMALL, **options}, attn_implementation=attention)
    return kind(config)


def vit(kind: type[hf.PreTrainedModel], attention: str = "sdpa", **options: Any) -> nn.Module:
    """A small ViT or DeiT, whose feed-forward width is an option of its own."""
    return build(kind, attention, intermediate_size=48, **options)


SQUARE = (32, 32)

CASES = by_name(
    [
        Case("vit", partial(vit, hf.ViTModel), SQUARE),
        Case("vit-even", partial(vit, hf.ViTModel, image_size=40, qkv_bias=False), (40, 40)),
        Case("vit-head", partial(vit, hf.ViTForImageClassification), SQUARE),
        Case(
            "vit-interpolated",
            partial(vit, hf.ViTForImageClassification),
            (24, 56),
            call={"interpolate_pos_encoding": True},
        ),
        # The eager softmax of ViT and DeiT runs in float32 in a model of any precision.
        Case(
            "vit-eager",
            partial(vit, hf.ViTForImageClassification, "eager"),
            SQUARE,
            tolerance=1e-5,
            bit_equal=False,
        ),
        Case("deit", partial(vit, hf.DeiTModel), SQUARE),
        Case("deit-head", partial(vit, hf.DeiTForImageClassification), SQUARE),
        Case("deit-teacher", partial(vit, hf.DeiTForImageClassificationWithTeacher), SQUARE),
        Case("dinov2", partial(build, hf.Dinov2Model), SQUARE),
        Case("dinov2-wide", partial(build, hf.Dinov2Model), (24, 56)),
        Case("dinov2-head", partial(build, hf.Dinov2ForImageClassification, use_swiglu_ffn=True), SQUARE),
        Case("dinov2-eager", partial(build, hf.Dinov2ForImageClassification, "eager"), SQUARE, bit_equal=False),
        Case("registers", partial(build, hf.Dinov2WithRegistersModel, num_register_tokens=4), SQUARE),
        Case(
            "registers-swiglu",
            partial(build, hf.Dinov2WithRegistersModel, num_register_tokens=3, use_swiglu_ffn=True),
            SQUARE,
        ),
        Case(
            "registers-head",
            partial(build, hf.Dinov2WithRegistersForImageClassification, num_register_tokens=4),
            SQUARE,
        ),
    ]
)
