"""k-means: tokens become the means of clusters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.features import Features, check_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods._groups import positions_like, rank_among, sizes_of, unit_features


@register_method("kmeans")
class KMeans(Method):
    """Cluster the tokens by k-means of their features, scaled to length 1, with a fixed number of iterations.

    Nothing is random: at first the ``r`` tokens that are most similar to an earlier one join others, and every other
    token is the center of a cluster. In each iteration the token nearest to a center stays with it, so that no cluster
    becomes empty, and all others join the nearest center. A token of size s counts s times in the center.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        iterations: how often tokens join centers.
    """

    def __init__(self, features: Features = "keys", iterations: int = 5) -> None:
        super().__init__()
        self.features = check_features(features)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise InvalidOption(f"iterations is a whole number of 1 or more; got {iterations!r}")
        self.iterations = iterations

    @property
    def options(self) -> dict[str, Any]:
        given = {"features": self.features, "iterations": self.iterations}
        return {name: value for name, value in given.items() if value != {"features": "keys", "iterations": 5}[name]}

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        with torch.autocast(context.x.device.type, enabled=False):
            unit = unit_features(context, self.features)
            free = context.mergeable.expand(unit.shape[:2])
            return Reduction(cluster(unit, free, sizes_of(context), r, self.iterations))

    def flops(self, tokens: int, head_width: int) -> int:
        return (self.iterations + 1) * tokens * tokens * head_width


def cluster(unit: Tensor, free: Tensor, size: Tensor, r: int, iterations: int) -> Assignment:
    """Return the clusters of the ``free`` tokens (B, N) by features (B, N, D); every other token is alone.

    There are N − r groups, of which those of tokens that are not free accept no others.
    """
    length, position = unit.shape[1] - r, positions_like(free)
    seeds = first_centers(unit, free, r)
    # one slot more than there are groups: the tokens that lead none write there
    slot = torch.where(seeds, seeds.long().cumsum(1) - 1, length)
    anchor = position.new_zeros(unit.shape[0], length + 1).scatter(1, slot, position)[:, :length]
    closed = ~free.gather(1, anchor)
    centers, target = unit.gather(1, anchor.unsqueeze(-1).expand(-1, -1, unit.shape[2])), slot
    for iteration in range(iterations):
        if iteration:
            centers = Assignment(target, length).merge(unit, size * free)
            anchor = nearest_members(unit, centers, target)
        distance = centers.square().sum(-1).unsqueeze(1) - 2 * unit @ centers.transpose(1, 2)
        nearest = distance.masked_fill(closed.unsqueeze(1), torch.inf).argmin(2)
        target = nearest.scatter(1, anchor, positions_like(anchor))
    return Assignment(target, length)


def first_centers(unit: Tensor, free: Tensor, r: int) -> Tensor:
    """Return True for all tokens (B, N) but the ``r`` free ones that are most similar to a free one before them."""
    pairs = (free.unsqueeze(2) & free.unsqueeze(1)).tril(-1)
    similarity = (unit @ unit.transpose(1, 2)).masked_fill(~pairs, -torch.inf).amax(2)
    novelty_rank = rank_among(-similarity, free)
    return ~free | (novelty_rank < free.sum(1, keepdim=True) - r)


def nearest_members(unit: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    """Return the position (B, C) of the member nearest to the center of each group; ties go to the lower index."""
    own = centers.gather(1, target.unsqueeze(-1).expand_as(unit))
    distance, position = (unit - own).square().sum(-1), positions_like(target)
    shape = centers.shape[:2]
    best = distance.new_full(shape, torch.inf).scatter_reduce(1, target, distance, "amin").gather(1, target)
    candidate = torch.where(distance == best, position, target.shape[1])
    return position.new_full(shape, target.shape[1]).scatter_reduce(1, target, candidate, "amin")
