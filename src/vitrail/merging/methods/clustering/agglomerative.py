"""ATC: agglomerative token clustering (Haurum et al., ECCV 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.features import Features, check_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods._groups import positions_like, sizes_of, targets_of, unit_features

LINKAGES = ("complete", "average", "single")


@register_method("agglomerative")
class Agglomerative(Method):
    """Merge the two nearest clusters, ``r`` times, starting from single tokens; distances are 1 − cosine.

    Exact, without approximations: every merge searches all pairs of clusters, so that a block costs r · N² comparisons
    for each image, one merge after the other. Use it with few merges or few tokens, or to see what a better matching is
    worth.

    Args:
        linkage: distance of two clusters: of their farthest members (``"complete"``), of all pairs of members in the
            mean (``"average"``), or of their nearest members (``"single"``).
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        by_size: let a token of size s count as s members in average linkage.
    """

    def __init__(self, linkage: str = "complete", features: Features = "keys", by_size: bool = False) -> None:
        super().__init__()
        if linkage not in LINKAGES:
            raise InvalidOption(f"linkage is one of {', '.join(LINKAGES)}; got {linkage!r}")
        if not isinstance(by_size, bool):
            raise InvalidOption(f"by_size is True or False; got {by_size!r}")
        self.linkage, self.features, self.by_size = linkage, check_features(features), by_size

    @property
    def options(self) -> dict[str, Any]:
        defaults = {"linkage": "complete", "features": "keys", "by_size": False}
        return {name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value}

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        with torch.autocast(context.x.device.type, enabled=False):
            unit = unit_features(context, self.features)
            free = context.mergeable.expand(unit.shape[:2])
            count = sizes_of(context).to(unit.dtype) if self.by_size else torch.ones_like(unit[..., 0])
            leader = cluster(unit, free, count, r, self.linkage)
            return Reduction(Assignment(targets_of(leader), unit.shape[1] - r))

    def flops(self, tokens: int, head_width: int) -> int:
        return tokens * tokens * head_width


def cluster(unit: Tensor, free: Tensor, count: Tensor, r: int, linkage: str) -> Tensor:
    """Return the first member (B, N) of each token's cluster, after ``r`` merges of the ``free`` tokens.

    Args:
        unit: features (B, N, D) of length 1.
        count: members that each token counts as (B, N).
    """
    batch, length = free.shape
    position = positions_like(free)
    products = unit @ unit.transpose(1, 2)
    distance = 1 - (products + products.transpose(1, 2)) / 2  # the same in both directions, to the last bit
    pairs = free.unsqueeze(1) & free.unsqueeze(2) & (position.unsqueeze(1) != position.unsqueeze(2))
    distance = distance.masked_fill(~pairs, torch.inf)
    leader = position.clone()
    for _ in range(r):
        # of equal distances the first in the matrix: the lowest first member, then the lowest second one
        nearest = distance.view(batch, -1).argmin(1, keepdim=True)
        first, second = nearest // length, nearest % length
        rows = (_index(first, length), _index(second, length))
        one, other = (distance.gather(1, row).squeeze(1) for row in rows)
        joined = _joined(one, other, count.gather(1, first), count.gather(1, second), linkage)
        joined = joined.masked_fill((position == first) | (position == second), torch.inf)
        gone = torch.full_like(joined, torch.inf)
        for row, values in zip(rows, (joined, gone), strict=True):
            distance.scatter_(1, row, values.unsqueeze(1))
            distance.scatter_(2, row.transpose(1, 2), values.unsqueeze(2))
        count = count.scatter_add(1, first, count.gather(1, second))
        leader = torch.where(leader == second, first, leader)
    return leader


def _index(place: Tensor, length: int) -> Tensor:
    """Return one place per image (B, 1) as the index of a row (B, 1, N)."""
    return place.unsqueeze(2).expand(-1, 1, length)


def _joined(one: Tensor, other: Tensor, weight: Tensor, other_weight: Tensor, linkage: str) -> Tensor:
    """Return the distances (B, N) of two joined clusters from the distances of both."""
    if linkage == "complete":
        return torch.maximum(one, other)
    if linkage == "single":
        return torch.minimum(one, other)
    return (one * weight + other * other_weight) / (weight + other_weight)
