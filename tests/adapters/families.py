"""One small model of each family, for tests that run on every family."""

from __future__ import annotations

from tests.parity import (
    models_open_clip,
    models_transformers_aimv2,
    models_transformers_audio,
    models_transformers_beit,
    models_transformers_clip,
    models_transformers_dinov3,
    models_transformers_video,
)
from tests.parity.models import Case

FAMILIES: dict[str, Case] = {
    "CLIP (transformers)": models_transformers_clip.CASES["tower"],
    "SigLIP (transformers)": models_transformers_clip.CASES["siglip"],
    "open_clip": models_open_clip.CASES["attention"],
    "DINOv3 (transformers)": models_transformers_dinov3.CASES["plain"],
    "AIMv2 (transformers)": models_transformers_aimv2.CASES["pooled"],
    "AST (transformers)": models_transformers_audio.CASES["ast-head"],
    "VideoMAE (transformers)": models_transformers_video.CASES["videomae-head"],
    "ViViT (transformers)": models_transformers_video.CASES["vivit-head"],
    "BEiT (transformers)": models_transformers_beit.CASES["both"],
    "data2vec-vision (transformers)": models_transformers_beit.CASES["data2vec"],
}
