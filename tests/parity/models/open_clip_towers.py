"""The vision tower of open_clip, with every pooling and every kind of block."""

from __future__ import annotations

from functools import partial
from typing import Any

from open_clip.transformer import QuickGELU, VisionTransformer
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "heads": 2, "mlp_ratio": 1.5, "output_dim": 16}
CUSTOM = {"qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True}
POOL = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4}


def tower(**options: Any) -> nn.Module:
    """Return a small vision tower: 16 patches and a class token."""
    return VisionTransformer(**{**SMALL, **options})


SQUARE = (32, 32)

# nn.MultiheadAttention has a fused path of its own, so r=0 is equal to rounding.
CASES = by_name(
    [
        Case("tower", partial(tower, act_layer=QuickGELU), SQUARE, bit_equal=False),
        Case("wide", partial(tower, image_size=(24, 56), ls_init_value=0.1), (24, 56), bit_equal=False),
        Case(
            "mean", partial(tower, pool_type="avg", final_ln_after_pool=True, no_ln_pre=True), SQUARE, bit_equal=False
        ),
        Case("tokens", partial(tower, pool_type="none"), SQUARE, bit_equal=False),
        Case("attention", partial(tower, **POOL), SQUARE, bit_equal=False),
        # Its second pooling takes the first one's channels for the tower's.
        Case(
            "cascade", partial(tower, output_dim=32, **{**POOL, "attentional_pool": "cascade"}), SQUARE, bit_equal=False
        ),
        Case("custom", partial(tower, **CUSTOM), SQUARE),
    ]
)
