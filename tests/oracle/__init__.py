"""The brute-force oracle: what merging means, in plain loops, independent of the library."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.oracle.core import Recipe, Result, run

__all__ = ["Recipe", "Result", "describe", "run"]


def describe(model: nn.Module, images: Tensor, **call: Any) -> Recipe:
    """Take a model apart and embed the images; `call` is what else its forward takes."""
    from open_clip.transformer import VisionTransformer as OpenClipTower
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos
    from torchvision.models import VisionTransformer as TorchvisionTransformer
    from transformers import PreTrainedModel

    from tests.oracle.models.open_clip_towers import describe_open_clip
    from tests.oracle.models.timm_blocks import describe_beit, describe_eva, describe_relpos, describe_vit
    from tests.oracle.models.torchvision_vit import describe_torchvision
    from tests.oracle.models.transformers_aimv2 import describe_aimv2
    from tests.oracle.models.transformers_audio import describe_ast
    from tests.oracle.models.transformers_beit import describe_beit as describe_hf_beit
    from tests.oracle.models.transformers_clip import describe_clip
    from tests.oracle.models.transformers_dinov3 import describe_dinov3
    from tests.oracle.models.transformers_relatives import describe_relative
    from tests.oracle.models.transformers_video import describe_video
    from tests.oracle.models.transformers_vit import describe_transformers
    from tests.oracle.models.transformers_vjepa2 import describe_vjepa2

    if isinstance(model, Beit):
        return describe_beit(model, images)
    if isinstance(model, Eva):
        return describe_eva(model, images)
    if isinstance(model, VisionTransformerRelPos):
        return describe_relpos(model, images)
    if isinstance(model, VisionTransformer):
        return describe_vit(model, images)
    if isinstance(model, TorchvisionTransformer):
        return describe_torchvision(model, images)
    if isinstance(model, OpenClipTower):
        return describe_open_clip(model, images)
    assert isinstance(model, PreTrainedModel), type(model)
    kind = model.config.model_type
    family = kind if kind in ("vit_mae", "vit_msn") else kind.split("_")[0]
    describers = {
        "aimv2": describe_aimv2,
        "audio": describe_ast,
        "beit": describe_hf_beit,
        "clip": describe_clip,
        "data2vec": describe_hf_beit,
        "dinov3": describe_dinov3,
        "ijepa": describe_relative,
        "metaclip": describe_clip,
        "pixio": describe_relative,
        "radio": describe_relative,
        "siglip": describe_clip,
        "tipsv2": describe_relative,
        "videomae": describe_video,
        "vit_mae": describe_relative,
        "vit_msn": describe_relative,
        "vivit": describe_video,
        "vjepa2": describe_vjepa2,
    }
    return describers.get(family.partition("-")[0], describe_transformers)(model, images, **call)
