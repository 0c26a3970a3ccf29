"""timm's VisionTransformer in its shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.layers import Attention, GluMlp, LayerNorm, RmsNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def vit(kind: type[nn.Module] = VisionTransformer, **options: Any) -> nn.Module:
    """Return a small VisionTransformer: 16 patches by default."""
    return kind(**{**SMALL, **options})


def named(name: str, **options: Any) -> nn.Module:
    """One of timm's registered architectures, made small."""
    return timm.create_model(name, **{**SMALL, **options})


def unfused() -> nn.Module:
    """Attention written out by timm instead of the fused function."""
    model = vit(qk_norm=True)
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def gated() -> nn.Module:
    """A sigmoid gate on the attention's output, which the blocks' constructor does not offer."""
    model = vit(depth=4)
    for block in model.blocks:
        block.attn = Attention(32, 2, qkv_bias=True, gated=True, qk_norm=True, scale_norm=True, norm_layer=LayerNorm)
    return model


def wide_heads() -> nn.Module:
    """Heads whose widths do not add up to the model's width."""
    model = vit()
    for block in model.blocks:
        block.attn = Attention(32, 2, attn_head_dim=24, qkv_bias=True)
    return model


def differential() -> nn.Module:
    """Differential attention, which not every version has."""
    from timm.layers import DiffAttention

    return vit(attn_layer=DiffAttention, init_values=0.5, qk_norm=True, scale_attn_norm=True)


SQUARE = (32, 32)
ATTENTION = ("timm", "1.0.28")
"""Version with gates, heads of any width, refined pooling, and special tokens without positions."""

CASES = by_name(
    [
        Case("class-odd", vit, SQUARE),
        Case("class-even", partial(vit, img_size=40), (40, 40)),
        Case("rectangle", partial(vit, img_size=(24, 56)), (24, 56)),
        Case("gap-no-class", partial(vit, class_token=False, global_pool="avg"), SQUARE),
        Case("gap-no-class-odd", partial(vit, class_token=False, global_pool="avg", img_size=40), (40, 40)),
        Case("gap-with-class", partial(vit, global_pool="avg"), SQUARE),
        Case("gap-with-prefix", partial(vit, global_pool="avg", pool_include_prefix=True), SQUARE),
        Case("avgmax", partial(vit, global_pool="avgmax", fc_norm=False), SQUARE),
        Case("max", partial(vit, global_pool="max"), SQUARE),
        Case("map", partial(vit, class_token=False, global_pool="map"), SQUARE),
        Case("map-with-prefix", partial(vit, global_pool="map", pool_include_prefix=True, fc_norm=True), SQUARE),
        Case("refined-pool", partial(vit, global_pool="prr"), SQUARE, needs=ATTENTION),
        Case("tokens-out", partial(vit, global_pool="", num_classes=0), SQUARE),
        Case("no-positions", partial(vit, pos_embed="none"), SQUARE, needs=ATTENTION),
        Case("registers", partial(vit, reg_tokens=4, no_embed_class=True, init_values=1.0), SQUARE),
        Case("registers-embedded", partial(vit, reg_tokens=3, qk_norm=True), SQUARE),
        Case(
            "registers-no-class",
            partial(vit, reg_tokens=3, class_token=False, global_pool="avg", no_embed_class=True),
            SQUARE,
        ),
        Case("distilled", partial(vit, VisionTransformerDistilled), SQUARE),
        Case("layer-scale", partial(vit, init_values=1e-5), SQUARE),
        Case("qk-norm", partial(vit, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True), SQUARE),
        Case("no-biases", partial(vit, qkv_bias=False, proj_bias=False), SQUARE),
        Case("gated", gated, SQUARE, needs=ATTENTION),
        Case("wide-heads", wide_heads, SQUARE, needs=ATTENTION),
        Case("glu", partial(vit, mlp_layer=GluMlp, norm_layer=RmsNorm, pre_norm=True), SQUARE),
        Case("post-norm", partial(vit, block_fn=ResPostBlock, init_values=1.0), SQUARE),
        # The library computes both halves of the first projection at once.
        Case("parallel", partial(vit, block_fn=ParallelScalingBlock, qk_norm=True), SQUARE, bit_equal=False),
        Case(
            "parallel-no-biases",
            partial(vit, block_fn=ParallelScalingBlock, qkv_bias=False, init_values=0.5),
            SQUARE,
            bit_equal=False,
        ),
        Case(
            "parallel-fused", partial(named, "vit_pwee_patch16_reg1_gap_256"), SQUARE, bit_equal=False, needs=ATTENTION
        ),
        Case("several-things", partial(vit, block_fn=ParallelThingsBlock, init_values=0.5, qk_norm=True), SQUARE),
        Case("differential", differential, SQUARE, tolerance=1e-6, bit_equal=False, needs=ATTENTION),
        Case("dynamic", partial(vit, dynamic_img_size=True, reg_tokens=1), (24, 56)),
        Case("dynamic-padded", partial(vit, dynamic_img_size=True, dynamic_img_pad=True), (27, 36)),
        Case("unfused", unfused, SQUARE, bit_equal=False),
        Case("clip-tower", partial(named, "vit_base_patch16_clip_224", num_classes=0), SQUARE),
        Case("clip-quick-gelu", partial(named, "vit_base_patch16_clip_quickgelu_224"), SQUARE),
        Case("siglip-tower", partial(named, "vit_base_patch16_siglip_224", num_classes=0), SQUARE),
        Case("dinov2-registers", partial(named, "vit_small_patch14_reg4_dinov2", num_classes=0), SQUARE),
        Case("deit3", partial(named, "deit3_small_patch16_224"), SQUARE),
    ]
)
