"""timm's Eva: rotary positions of all kinds, EVA-02, DINOv3, Perception Encoder, grouped heads.

Temperatures are powers of two where the comparison is to rounding, so that timm's frequencies, computed in
float32, are exact numbers; so are the grids.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.layers import AttentionRope, LayerNorm
from timm.models.eva import Eva, EvaAttention
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 5}
ROTARY = {"use_rot_pos_emb": True, "rope_temperature": 16.0}
DINOV3 = {**ROTARY, "rope_type": "dinov3", "rope_rotate_half": True, "use_abs_pos_emb": False}
MIXED = {**ROTARY, "rope_type": "mixed"}


def eva(**options: Any) -> nn.Module:
    """Return a small Eva: 16 patches and a class token by default."""
    return Eva(**{**SMALL, **options})


def named(name: str, **options: Any) -> nn.Module:
    """One of timm's registered architectures, made small."""
    return timm.create_model(name, **{**SMALL, **options})


def gated(attention: type[nn.Module], **options: Any) -> nn.Module:
    """A sigmoid gate on the attention's output, which the model's constructor does not offer."""
    model = eva(**ROTARY)
    for block in model.blocks:
        block.attn = attention(64, 4, gated=True, qk_norm=True, scale_norm=True, norm_layer=LayerNorm, **options)
    return model


SQUARE, WIDE = (32, 32), (32, 64)
ATTENTION = ("timm", "1.0.28")
"""Version with gates, grouped heads, scaled norms and rotary pairs half a head apart."""

CASES = by_name(
    [
        Case("absolute", partial(eva, init_values=0.1), SQUARE),
        Case(
            "eva02",
            partial(eva, **ROTARY, swiglu_mlp=True, scale_mlp=True, qkv_fused=False, ref_feat_shape=(16, 16)),
            SQUARE,
        ),
        Case(
            "eva02-packed",
            partial(eva, **ROTARY, swiglu_mlp=True, img_size=WIDE, ref_feat_shape=(8, 8)),
            WIDE,
        ),
        Case("eva02-inner-norm", partial(eva, **ROTARY, scale_attn_inner=True, global_pool="token"), SQUARE),
        Case("post-norm", partial(eva, **ROTARY, use_post_norm=True), SQUARE),
        Case(
            "cat-xy-offset",
            partial(eva, **ROTARY, rope_grid_indexing="xy", rope_grid_offset=1.0, img_size=WIDE),
            WIDE,
        ),
        Case("cat-halves", partial(eva, **ROTARY, rope_rotate_half=True), SQUARE, needs=ATTENTION),
        Case("cat-dynamic", partial(eva, **ROTARY, dynamic_img_size=True), (24, 56), tolerance=1e-5),
        Case(
            "registers-no-class",
            partial(eva, **ROTARY, attn_type="rope", class_token=False, num_reg_tokens=1, no_embed_class=True),
            SQUARE,
        ),
        Case("no-prefix", partial(eva, **ROTARY, class_token=False, use_abs_pos_emb=False), SQUARE),
        Case("dinov3", partial(eva, **DINOV3, num_reg_tokens=4, init_values=1e-5, no_embed_class=True), SQUARE),
        Case("dinov3-dynamic", partial(eva, **DINOV3, num_reg_tokens=3, dynamic_img_size=True), WIDE),
        Case("dinov3-xy", partial(eva, **DINOV3, rope_grid_indexing="xy", img_size=WIDE, swiglu_mlp=True), WIDE),
        Case(
            "mixed-xy",
            partial(eva, **MIXED, rope_grid_indexing="xy", img_size=WIDE, init_values=0.1),
            WIDE,
            tolerance=1e-6,
        ),
        Case(
            "mixed-dynamic",
            partial(eva, **MIXED, dynamic_img_size=True, num_reg_tokens=2),
            (24, 56),
            tolerance=1e-6,
        ),
        Case(
            "grouped-heads",
            partial(
                eva,
                **DINOV3,
                attn_type="rope",
                qkv_fused=False,
                qk_norm=True,
                num_kv_heads=(4, 2, 1),
                num_reg_tokens=2,
                attn_only_layer_scale=True,
                init_values=0.1,
                swiglu_mlp=True,
                swiglu_align_to=8,
            ),
            SQUARE,
            needs=ATTENTION,
        ),
        Case(
            "qk-norm",
            partial(eva, **ROTARY, attn_type="rope", qk_norm=True, scale_attn_inner=True),
            SQUARE,
            needs=ATTENTION,
        ),
        Case("gated-eva", partial(gated, EvaAttention, num_prefix_tokens=1), SQUARE, needs=ATTENTION),
        Case("gated-rope", partial(gated, AttentionRope, num_prefix_tokens=1), SQUARE, needs=ATTENTION),
        Case(
            "perception-encoder",
            partial(named, "vit_pe_core_base_patch16_224", rope_temperature=16.0, ref_feat_shape=4),
            SQUARE,
        ),
        Case("dinov3-tower", partial(named, "vit_small_patch16_dinov3", rope_temperature=16.0), SQUARE),
    ]
)
