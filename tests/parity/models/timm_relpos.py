"""timm's VisionTransformerRelPos: a bias from a table or an MLP, in every block or shared."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from torch import nn

from tests.parity.models.cases import Case, by_name

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def relpos(**options: Any) -> nn.Module:
    """Return a small model of 16 patches."""
    return VisionTransformerRelPos(**{**SMALL, **options})


SQUARE = (32, 32)

CASES = by_name(
    [
        Case("mlp", partial(relpos, rel_pos_type="mlp", init_values=0.1), SQUARE, tolerance=1e-6),
        Case(
            "mlp-shared",
            partial(relpos, rel_pos_type="mlp", shared_rel_pos=True, class_token=True),
            SQUARE,
            tolerance=1e-6,
        ),
        Case("table", partial(relpos, rel_pos_type="bias", class_token=True, global_pool="token"), SQUARE),
        Case("post-norm", partial(relpos, rel_pos_type="bias", block_fn=ResPostRelPosBlock, init_values=0.5), SQUARE),
    ]
)
