"""Random: the control that merges random pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.merging.features import compute_features
from vitrail.merging.method import Context, Reduction, register_method
from vitrail.merging.methods.tome import ToMe


@register_method("random")
class Random(ToMe):
    """Merge r random pairs of the same bipartite matching: the baseline that shows the value of similarity."""

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        noise = torch.randn_like(compute_features(context, self.features).detach())
        return Reduction(context.match(noise, r))
