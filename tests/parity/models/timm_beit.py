"""timm's Beit: relative position bias in every block, shared among them, both, or none."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.beit import Beit
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def beit(**options: Any) -> nn.Module:
    """Return a small Beit: 16 patches and a class token by default."""
    return Beit(**{**SMALL, "use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1, **options})


def unfused() -> nn.Module:
    """Attention written out by timm instead of the fused function."""
    model = beit()
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


SQUARE = (32, 32)

CASES = by_name(
    [
        Case("own", beit, SQUARE),
        Case("shared", partial(beit, use_rel_pos_bias=False, use_shared_rel_pos_bias=True), SQUARE),
        Case("both", partial(beit, use_shared_rel_pos_bias=True, img_size=(24, 48)), (24, 48)),
        Case("none", partial(beit, use_rel_pos_bias=False, use_abs_pos_emb=True, global_pool="token"), SQUARE),
        Case("swiglu", partial(beit, swiglu_mlp=True, scale_mlp=True, qkv_bias=False, init_values=None), SQUARE),
        Case("unfused", unfused, SQUARE, bit_equal=False),
    ]
)
