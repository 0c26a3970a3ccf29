"""Models whose attention runs inside windows: shifted, padded, pooled between stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models.hiera import Hiera
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn
from torchvision.models import swin_transformer as torchvision_swin
from transformers import (
    Sam2HieraDetConfig,
    Sam2HieraDetModel,
    SamVisionConfig,
    SamVisionModel,
    SwinConfig,
    SwinForImageClassification,
    VitDetConfig,
    VitDetModel,
)

from tests.oracle.models.windowed import (
    Windowed,
    describe_hf_swin,
    describe_hiera,
    describe_mvit,
    describe_sam,
    describe_sam2,
    describe_timm_sam,
    describe_timm_swin,
    describe_torchvision_swin,
    describe_vitdet,
)
from tests.parity.models.cases import Case, by_name

SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "num_classes": 5}
STAGES = {"depths": (2, 2), "num_heads": (1, 2)}


def timm_swin(kind: Any = SwinTransformer, **options: Any) -> nn.Module:
    """Return a small Swin: 8 × 8 patches in four windows, then one window."""
    return kind(**{**SWIN, **STAGES, **options})


def torchvision_model(block: Any = None, merging: Any = None, **options: Any) -> nn.Module:
    """Return torchvision's Swin, V1 or V2."""
    sizes: dict[str, Any] = {"patch_size": [4, 4], "window_size": [4, 4], "embed_dim": 16, "num_classes": 5}
    parts = {} if block is None else {"block": block, "downsample_layer": merging}
    return torchvision_swin.SwinTransformer(**{**sizes, "depths": [2, 2], "num_heads": [1, 2], **parts, **options})


def hf_swin() -> nn.Module:
    """Return transformers' Swin."""
    config = SwinConfig(
        image_size=32, patch_size=4, window_size=4, embed_dim=16, depths=[2, 2], num_heads=[1, 2], num_labels=5
    )
    return SwinForImageClassification(config)


def sam(**options: Any) -> nn.Module:
    """Return SAM's image encoder: one block over all tokens, then two in windows of 3 × 3 in a grid of 8 × 8.

    Tokens that were merged and restored are equal, and rounding decides between equal pairs, so few merge in the first.
    """
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_dim": 32, "output_channels": 8}
    grid = {"image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [0]}
    return SamVisionModel(SamVisionConfig(**{**sizes, **grid, **options}))


def hiera() -> nn.Module:
    """Return Hiera: two stages with mask units, two without."""
    sizes = {"img_size": (64, 64), "embed_dim": 8, "num_heads": 1, "num_classes": 5}
    return Hiera(**sizes, stages=(2, 2, 2, 2), mask_unit_size=(8, 8))


def sam2() -> nn.Module:
    """Return SAM 2's image encoder: windows that do not divide the grid of their stage, and one block over all."""
    config = Sam2HieraDetConfig(
        hidden_size=8,
        num_attention_heads=1,
        image_size=[96, 96],
        blocks_per_stage=[1, 2, 3, 2],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 2, 4],
        window_size_per_stage=[8, 8, 4, 2],
        global_attention_blocks=[4],
        window_positional_embedding_background_size=[4, 4],
    )
    return Sam2HieraDetModel(config)


def timm_sam(**options: Any) -> nn.Module:
    """Return timm's SAM encoder: one block over all tokens, then two in windows of 3 × 3 in a grid of 8 × 8.

    Its positions are zeros when new.
    """
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "neck_chans": 8}
    windows = {"window_size": 3, "global_attn_indexes": (0,), "use_rel_pos": True, "num_classes": 5}
    return with_positions(VisionTransformerSAM(**{**sizes, **windows, **options}))


def vitdet() -> nn.Module:
    """Return ViTDet: a block over all tokens, windows of 3 × 3, a residual convolution, and again windows."""
    config = VitDetConfig(
        image_size=64,
        pretrain_image_size=64,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        window_size=3,
        window_block_indices=[1, 2, 3],
        residual_block_indices=[2],
        use_relative_position_embeddings=True,
    )
    return with_positions(VitDetModel(config))


def mvit(**options: Any) -> nn.Module:
    """Return MViT v2: keys of 4 × 4 and 2 × 2 tokens, then two stages of keys for every token."""
    sizes = {"depths": (1, 1, 3, 2), "embed_dim": 8, "num_heads": 1}
    return with_positions(MultiScaleVit(MultiScaleVitCfg(**{**sizes, **options}), img_size=64, num_classes=5))


def with_positions(model: nn.Module) -> nn.Module:
    """Return a model with relative positions other than zeros."""
    for name, weight in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(weight)
    return model


SQUARE = (32, 32)
V2 = partial(torchvision_model, torchvision_swin.SwinTransformerBlockV2, torchvision_swin.PatchMergingV2)

CASES = by_name(
    [
        Case("swin", timm_swin, SQUARE),
        Case("swin-padded", partial(timm_swin, img_size=(44, 36), strict_img_size=False), (44, 36)),
        Case("swin-always", partial(timm_swin, always_partition=True, window_size=(4, 2)), SQUARE),
        Case("swin-v2", partial(timm_swin, SwinTransformerV2), SQUARE),
        Case("swin-v2-bare", partial(timm_swin, SwinTransformerV2, qkv_bias=False, img_size=(64, 32)), (64, 32)),
        Case("torchvision", torchvision_model, SQUARE),
        Case("torchvision-padded", torchvision_model, (44, 36)),
        Case("torchvision-v2", V2, SQUARE),
        Case("hf-swin", hf_swin, SQUARE),
        Case("hf-swin-padded", hf_swin, (44, 36)),
        Case("sam", sam, (64, 64)),
        Case("sam-eager", partial(sam, attn_implementation="eager", use_abs_pos=False), (64, 64), tolerance=1e-5),
        Case("sam-plain", partial(sam, use_rel_pos=False), (64, 64)),
        Case("samvit", timm_sam, (64, 64)),
        Case("samvit-norms", partial(timm_sam, qk_norm=True, init_values=0.5, use_rel_pos=False), (64, 64)),
        Case("vitdet", vitdet, (64, 64)),
        Case("mvit", mvit, (64, 64)),
        Case("mvit-late", partial(mvit, expand_attn=False, residual_pooling=False), (64, 64)),
        Case("hiera", hiera, (64, 64)),
        Case("sam2", sam2, (96, 96)),
    ]
)

DESCRIBE: dict[str, Callable[[Any, Tensor], Windowed]] = {
    "swin": describe_timm_swin,
    "torchvision": describe_torchvision_swin,
    "hf": describe_hf_swin,
    "sam": describe_sam,
    "samvit": describe_timm_sam,
    "vitdet": describe_vitdet,
    "mvit": describe_mvit,
    "hiera": describe_hiera,
    "sam2": describe_sam2,
}
"""What takes a case apart, by the first part of its name."""
