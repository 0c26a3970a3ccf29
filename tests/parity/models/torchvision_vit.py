"""torchvision's VisionTransformer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from tests.parity.models.cases import Case, by_name


def vit(**options: Any) -> nn.Module:
    """A small VisionTransformer: 16 patches and a class token."""
    small = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 48}
    return VisionTransformer(**{**small, "num_classes": 5, **options})


STEM = [ConvStemConfig(8, 3, 2), ConvStemConfig(12, 3, 2), ConvStemConfig(16, 3, 2)]

# nn.MultiheadAttention has a fused path of its own, so r=0 is equal to rounding.
CASES = by_name(
    [
        Case("vit", vit, (32, 32), bit_equal=False),
        Case("vit-even", partial(vit, image_size=40), (40, 40), bit_equal=False),
        Case("stem", partial(vit, conv_stem_configs=STEM, representation_size=24), (32, 32), bit_equal=False),
    ]
)
