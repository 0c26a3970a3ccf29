"""timm's ``Beit`` (BEiT, BEiT v2): the blocks of ``Eva``, with a relative position bias instead of rotary position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.named_block import TIMM_NAMES
from vitrail.adapters.position import Position, RelativeBias
from vitrail.adapters.timm.eva import EvaNamedBlock
from vitrail.adapters.timm.vit import TimmVisionTransformer

_BEIT = replace(
    TIMM_NAMES,
    q_norm=None,
    k_norm=None,
    after_attend=("gamma_1", "drop_path1"),
    after_feed=("gamma_2", "drop_path2"),
    dense=None,
)


class BeitNamedBlock(EvaNamedBlock):
    """A block of ``Beit``; its bias is read by the trunk, which may share one among all blocks."""

    biased = True


class TimmBeit(TimmVisionTransformer):
    """``Beit``: the same outside, a relative position bias inside."""

    block_classes = {"timm.models.beit.Block": BeitNamedBlock(_BEIT)}  # noqa: RUF012

    def resizes(self, trunk: Any) -> bool:
        return False

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        def between(layer: int) -> Tensor | None:
            own = _bias(trunk.blocks[layer].attn)
            shared = None if trunk.rel_pos_bias is None else _bias(trunk.rel_pos_bias)
            own = None if own is None else own.unsqueeze(0)  # as timm, so that the same kernel runs
            return shared if own is None else own if shared is None else own + shared

        return RelativeBias(between)


def _bias(part: Any) -> Tensor | None:
    """Return the bias (H, N, N) of an attention or of a shared module; None where it has none."""
    if part.relative_position_bias_table is None:
        return None
    bias: Tensor = part.relative_position_bias_table[part.relative_position_index]
    return bias.permute(2, 0, 1).contiguous()
