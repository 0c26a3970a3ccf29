"""EViT: the most attended tokens stay, the others become one (Liang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.method import Context, Method, ModelShape, Reduction, register_method
from vitrail.merging.methods._groups import (
    most_similar,
    positions_like,
    rank_among,
    sizes_of,
    targets_of,
    unit_features,
)
from vitrail.merging.methods.pruning._keep import class_attention, keep_only, require_class_token
from vitrail.merging.methods.pruning._stages import check_rate, stage_shares

FUSIONS = ("sum", "mean", "drop")


@register_method("evit")
class EViT(Method):
    """Keep the tokens that the class token attends to most, and fuse the others into one token.

    Without a schedule it reduces in three blocks, the fourth, seventh and tenth of 12. The fused token counts as one
    token (size 1), as published.

    Args:
        fuse: ``"sum"``, as published: the fused token is Σ a·x, with a the attention of the class token; ``"mean"``:
            Σ a·x / Σ a; ``"drop"``: there is none, and dropped tokens are restored from the most similar kept one.
        rate: share of tokens that each block keeps in the default schedule; ``keep=rate**3`` is the published setting.
    """

    def __init__(self, fuse: str = "sum", rate: float = 0.7) -> None:
        super().__init__()
        if fuse not in FUSIONS:
            raise InvalidOption(f"fuse is one of {', '.join(FUSIONS)}; got {fuse!r}")
        self.fuse, self.rate = fuse, check_rate(rate)

    @property
    def options(self) -> dict[str, Any]:
        defaults = {"fuse": "sum", "rate": 0.7}
        return {name: value for name, value in vars(self).items() if name in defaults and value != defaults[name]}

    @property
    def averages(self) -> bool:
        return self.fuse != "sum"

    def check(self, shape: ModelShape) -> None:
        require_class_token(self.label, shape)

    def layers(self, depth: int) -> Sequence[float]:
        return stage_shares(depth, self.rate)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        attention = class_attention(context).mean(1)
        free = context.mergeable.expand(attention.shape)
        fuses = int(self.fuse != "drop")
        attentive = rank_among(attention, free) < free.sum(1, keepdim=True) - r - fuses
        kept = attentive & free
        if not fuses:
            return keep_only(context, kept, most_similar(unit_features(context, "keys"), kept), r)
        fused = free & ~kept
        position = positions_like(fused)
        first = torch.where(fused, position, fused.shape[1]).amin(1, keepdim=True)
        target = targets_of(torch.where(fused, first, position))
        size = sizes_of(context)
        size = torch.where(fused, (position == first).to(size.dtype), size)
        weight = torch.where(fused, attention, (size > 0).to(attention.dtype))
        return Reduction(Assignment(target, fused.shape[1] - r), weight=weight, size=size)

    def pool(self, x: Tensor, assignment: Assignment, weight: Tensor | None) -> Tensor:
        if self.fuse != "sum" or weight is None:
            return assignment.merge(x, weight)
        weighted = x.to(weight.dtype) * weight.unsqueeze(-1)
        total = weighted.new_zeros(x.shape[0], assignment.length, x.shape[2])
        return total.scatter_add(1, assignment.target.unsqueeze(-1).expand_as(weighted), weighted).to(x.dtype)

    def flops(self, tokens: int, head_width: int) -> int:
        return tokens * tokens * head_width if self.fuse == "drop" else 0
