"""The families of models that Vitrail supports, each with a small model: the rows of the table in ``docs/models.md``.

A new family is one entry here; ``python tools/models_table.py`` tries what works and writes the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.models import (
    open_clip_towers,
    timm_beit,
    timm_eva,
    timm_relpos,
    timm_vit,
    torchvision_vit,
    transformers_aimv2,
    transformers_audio,
    transformers_beit,
    transformers_clip,
    transformers_dinov3,
    transformers_relatives,
    transformers_siglip2,
    transformers_video,
    transformers_vit,
    transformers_vjepa2,
    windowed,
)
from tests.parity.models.cases import Case


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        case: a small model, which takes its inputs alone.
        names: by what name to load such models, as for `vitrail.load_model`.
        compiled: whether its tests compile and export it even where another family has the same blocks.
    """

    case: Case
    names: str
    compiled: bool = True


_VIT, _HF = timm_vit.CASES, transformers_vit.CASES
_RELATIVES, _WINDOWED = transformers_relatives.CASES, windowed.CASES

FAMILIES: dict[str, Family] = {
    "ViT, DeiT 3, AugReg (timm)": Family(_VIT["class-even"], "timm:vit_base_patch16_224"),
    "DeiT, distilled (timm)": Family(_VIT["distilled"], "timm:deit_base_distilled_patch16_224", False),
    "CLIP (timm)": Family(_VIT["clip-tower"], "timm:vit_base_patch16_clip_224", False),
    "SigLIP, SigLIP 2 (timm)": Family(_VIT["siglip-tower"], "timm:vit_base_patch16_siglip_224", False),
    "DINOv2, with registers (timm)": Family(_VIT["dinov2-registers"], "timm:vit_small_patch14_reg4_dinov2", False),
    "AIMv2, InternViT: RMSNorm, SwiGLU (timm)": Family(
        _VIT["glu"], "timm:aimv2_large_patch14_224 timm:vit_intern300m_patch14_448", False
    ),
    "EVA02 (timm)": Family(timm_eva.CASES["eva02"], "timm:eva02_base_patch14_224", False),
    "DINOv3 (timm)": Family(timm_eva.CASES["dinov3"], "timm:vit_small_patch16_dinov3", False),
    "PE core, spatial, lang (timm)": Family(
        timm_eva.CASES["perception-encoder"],
        "timm:vit_pe_core_base_patch16_224 timm:vit_pe_spatial_base_patch16_512",
        False,
    ),
    "BEiT, BEiT v2 (timm)": Family(timm_beit.CASES["own"], "timm:beit_base_patch16_224", False),
    "ViT with relative position (timm)": Family(timm_relpos.CASES["table"], "timm:vit_relpos_base_patch16_224", False),
    "ViT with attention beside the MLP (timm)": Family(_VIT["parallel-no-biases"], "timm:vit_base_patch16_xp_224"),
    "ViT with parallel attentions and MLPs (timm)": Family(
        _VIT["several-things"], "timm:vit_small_patch16_18x2_224", False
    ),
    "ViT with differential attention (timm)": Family(_VIT["differential"], "timm:vit_dwee_patch16_reg1_gap_256"),
    "Swin (timm)": Family(_WINDOWED["swin"], "timm:swin_tiny_patch4_window7_224"),
    "Swin V2 (timm)": Family(_WINDOWED["swin-v2"], "timm:swinv2_tiny_window8_256", False),
    "Hiera (timm)": Family(_WINDOWED["hiera"], "timm:hiera_tiny_224"),
    "MViT v2 (timm)": Family(_WINDOWED["mvit"], "timm:mvitv2_tiny"),
    "SAM (timm)": Family(_WINDOWED["samvit"], "timm:samvit_base_patch16", False),
    "ViT, DeiT (transformers)": Family(_HF["deit-head"], "hf:facebook/deit-base-distilled-patch16-224", False),
    "DINOv2, with registers (transformers)": Family(_HF["registers-head"], "hf:facebook/dinov2-with-registers-base"),
    "DINOv3 (transformers)": Family(transformers_dinov3.CASES["plain"], "hf:facebook/dinov3-vits16-pretrain-lvd1689m"),
    "CLIP (transformers)": Family(transformers_clip.CASES["tower"], "hf:openai/clip-vit-base-patch32"),
    "MetaCLIP 2 (transformers)": Family(
        _RELATIVES["metaclip2"], "hf:facebook/metaclip-2-worldwide-huge-quickgelu", False
    ),
    "SigLIP, SigLIP 2 (transformers)": Family(transformers_clip.CASES["siglip"], "hf:google/siglip2-base-patch16-224"),
    "SigLIP 2 NaFlex (transformers)": Family(
        transformers_siglip2.IMAGES, "hf:google/siglip2-base-patch16-naflex", False
    ),
    "BEiT (transformers)": Family(transformers_beit.CASES["both"], "hf:microsoft/beit-base-patch16-224"),
    "data2vec-vision (transformers)": Family(transformers_beit.CASES["data2vec"], "hf:facebook/data2vec-vision-base"),
    "AIMv2 (transformers)": Family(transformers_aimv2.CASES["pooled"], "hf:apple/aimv2-large-patch14-224-lit"),
    "I-JEPA (transformers)": Family(_RELATIVES["ijepa-head"], "hf:facebook/ijepa_vith14_1k"),
    "ViT-MSN (transformers)": Family(_RELATIVES["msn-head"], "hf:facebook/vit-msn-base", False),
    "ViT-MAE (transformers)": Family(_RELATIVES["mae"], "hf:facebook/vit-mae-base"),
    "Pixio (transformers)": Family(_RELATIVES["pixio"], "hf:facebook/pixio-vitb16"),
    "TIPSv2 (transformers)": Family(_RELATIVES["tipsv2"], "hf:google/tipsv2-b14"),
    "C-RADIO (transformers)": Family(_RELATIVES["radio"], "hf:nvidia/C-RADIOv4-H"),
    "Swin (transformers)": Family(_WINDOWED["hf-swin"], "hf:microsoft/swin-tiny-patch4-window7-224", False),
    "SAM (transformers)": Family(_WINDOWED["sam"], "hf:facebook/sam-vit-base"),
    "SAM 2 (transformers)": Family(_WINDOWED["sam2"], "hf:facebook/sam2.1-hiera-tiny", False),
    "ViTDet (transformers)": Family(_WINDOWED["vitdet"], "hf:google/vitdet-base-patch16-224"),
    "VideoMAE (transformers)": Family(
        transformers_video.CASES["videomae-head"], "hf:MCG-NJU/videomae-base-finetuned-kinetics"
    ),
    "ViViT (transformers)": Family(transformers_video.CASES["vivit-head"], "hf:google/vivit-b-16x2-kinetics400"),
    "V-JEPA 2 (transformers)": Family(
        transformers_vjepa2.CASES["vjepa2-head"], "hf:facebook/vjepa2-vitl-fpc16-256-ssv2"
    ),
    "AST (transformers)": Family(transformers_audio.CASES["ast-head"], "hf:MIT/ast-finetuned-audioset-10-10-0.4593"),
    "ViT (torchvision)": Family(torchvision_vit.CASES["vit"], "torchvision:vit_b_16", False),
    "Swin, Swin V2 (torchvision)": Family(_WINDOWED["torchvision"], "torchvision:swin_t torchvision:swin_v2_t", False),
    "CLIP, CoCa and others (open_clip)": Family(open_clip_towers.CASES["attention"], "open_clip:ViT-B-32:openai"),
}
"""Families by their names in the table."""

every_family = list(FAMILIES)
