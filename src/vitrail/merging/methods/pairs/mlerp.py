"""MLERP: ToFu (Kim et al., WACV 2024), which prunes in early layers and keeps the norm of tokens where it merges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.features import Features
from vitrail.merging.method import Context, Reduction, register_method
from vitrail.merging.methods.pruning.prune import prefer_destinations, weight_of_one
from vitrail.merging.methods.tome import ToMe


@register_method("mlerp")
class MLERP(ToMe):
    """Merge as ToMe does, into tokens with the direction of the mean and the largest norm of the group.

    The mean of tokens is shorter than its members, which later layers have not seen. Early layers are far from linear,
    so that a mean of inputs is not the mean of outputs: there the destination stays and its sources are dropped.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        prune: share of the blocks, from the first one, that prune instead of merging. The paper prunes early and
            merges late without one number for all models; half of the blocks is our default.
    """

    def __init__(self, features: Features = "keys", prune: float = 0.5) -> None:
        super().__init__(features)
        if not is_number(prune) or not 0 <= prune <= 1:
            raise InvalidOption(f"prune is the share of the blocks that prune, from 0 to 1; got {prune!r}")
        self.prune = float(prune)

    @property
    def twin(self) -> str | None:
        return None

    @property
    def options(self) -> dict[str, Any]:
        return super().options | ({} if self.prune == 0.5 else {"prune": self.prune})

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        reduction = super().reduce(context, r)
        if context.layer >= self.prune * context.depth:
            return reduction
        return replace(reduction, weight=weight_of_one(context, reduction, prefer_destinations(context)))

    def pool(self, x: Tensor, assignment: Assignment, weight: Tensor | None) -> Tensor:
        mean = assignment.merge(x, weight)
        work = torch.promote_types(x.dtype, torch.float32)
        counted = torch.ones(assignment.target.shape, device=x.device) if weight is None else (weight > 0).float()
        norm = torch.linalg.vector_norm(x.to(work), dim=2).expand(counted.shape) * counted
        largest = norm.new_zeros(mean.shape[:2]).scatter_reduce(1, assignment.target, norm, "amax")
        own = torch.linalg.vector_norm(mean.to(work), dim=2)
        # a token that is alone stays exactly, and a mean of 0 has no direction
        scaled = (assignment.merge_sizes(counted) > 1) & (own > 0)
        factor = torch.where(scaled, largest / own.masked_fill(own == 0, 1), 1)
        return mean * factor.unsqueeze(2).to(mean.dtype)
