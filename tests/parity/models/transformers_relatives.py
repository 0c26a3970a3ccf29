"""Models of the transformers library that have the blocks of ViT, DINOv2 and CLIP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.parity.models.cases import Case, by_name
from tests.parity.models.transformers_clip import INTERPOLATED, tower
from tests.parity.models.transformers_vit import SQUARE, build, vit


class OrderedMae(hf.ViTMAEModel):
    """ViT-MAE that leaves its patches in order."""

    def forward(self, pixel_values: Tensor, noise: Tensor | None = None, **kwargs: Any) -> Any:
        height, width = (side // 8 for side in pixel_values.shape[2:])
        noise = torch.arange(height * width).expand(pixel_values.shape[0], -1) if noise is None else noise
        return super().forward(pixel_values, noise=noise, **kwargs)


def named(name: str, **options: Any) -> nn.Module:
    """Return a small model of a class that not every version has."""
    return build(getattr(hf, name), **options)


RECENT = ("transformers", "5.22")
"""Version with C-RADIO and TIPSv2."""

CASES = by_name(
    [
        Case("ijepa", partial(vit, hf.IJepaModel), SQUARE),
        Case("ijepa-head", partial(vit, hf.IJepaForImageClassification), SQUARE),
        Case("msn", partial(vit, hf.ViTMSNModel), SQUARE),
        Case("msn-head", partial(vit, hf.ViTMSNForImageClassification), SQUARE),
        Case("mae", partial(vit, OrderedMae, mask_ratio=0.0), SQUARE),
        Case("mae-interpolated", partial(vit, OrderedMae, mask_ratio=0.0), (24, 56), call=INTERPOLATED),
        Case("pixio", partial(build, hf.PixioModel, n_cls_tokens=3), SQUARE),
        Case("pixio-wide", partial(build, hf.PixioModel, n_cls_tokens=2), (24, 56), needs=RECENT),
        Case("tipsv2", partial(named, "Tipsv2VisionModel", num_register_tokens=2), SQUARE, needs=RECENT),
        Case("tipsv2-swiglu", partial(named, "Tipsv2VisionModel", use_swiglu_ffn=True), (24, 56), needs=RECENT),
        Case("radio", partial(named, "RadioModel", max_img_size=64), (24, 56), needs=RECENT),
        Case(
            "radio-swiglu",
            partial(named, "RadioModel", max_img_size=32, use_swiglu_ffn=True, num_cls_tokens=2, num_registers=3),
            SQUARE,
            needs=RECENT,
        ),
        Case("metaclip2", partial(tower, hf.MetaClip2VisionModel), SQUARE),
        Case("metaclip2-projection", partial(tower, hf.MetaClip2VisionModelWithProjection), SQUARE),
    ]
)
