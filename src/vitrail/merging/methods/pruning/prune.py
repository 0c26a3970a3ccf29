"""Prune: the control that drops the tokens that ToMe would merge."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.merging.method import Context, Reduction, register_method
from vitrail.merging.methods.tome import ToMe


@register_method("prune")
class Prune(ToMe):
    """Drop the tokens that ToMe would merge into others: pruning against merging with the same matching.

    The positions of dropped tokens are restored from the token that stays in their group.
    """

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        step = super().reduce(context, r).assignment
        present = context.present
        ones = torch.ones_like(step.target) if present is None else present.long()
        members = step.merge_sizes(ones).gather(1, step.target)
        destination = torch.arange(step.target.shape[1], device=members.device) % 2 == 1
        stays = (members == 1) | destination
        work = torch.promote_types(context.x.dtype, torch.float32)
        return Reduction(step, weight=stays.to(work) if context.size is None else stays * context.size)
