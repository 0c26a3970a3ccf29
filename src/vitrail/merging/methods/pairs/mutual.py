"""Mutual: merges pairs of tokens that are each other's most similar one (MPM, 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.merging.bipartite import Protected, cosines, protected_mask
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method


@register_method("mutual")
class Mutual(Method):
    """Merge mutual nearest neighbors among all patches before attention: all of them, or the r most similar pairs.

    Nothing is split into two sets, so every pair of patches may merge, and no token merges into one that prefers
    another. An image has as many pairs as it has, so images keep different numbers of tokens. By default tokens merge
    before the second and the fifth of twelve blocks, and at the same shares of the depth in other models.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
    """

    static = False
    place = "before"
    places_groups = True
    takes_padding = True

    def __init__(self, features: Features = "tokens") -> None:
        super().__init__()
        self.features = check_features(features)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.features == "tokens" else {"features": self.features}

    def layers(self, depth: int) -> Sequence[float]:
        shares = [0.0] * depth
        for block in (1, 4):
            shares[min(depth - 1, round(block * depth / 12))] += 0.5
        return shares

    def capacity(self, tokens: int, protected: Protected) -> int:
        # the image with the most free tokens decides: each merges its own number of pairs
        free = tokens - protected if isinstance(protected, int) else int((~protected).sum(1).max())
        return max(0, free // 2)

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        cosine = cosines(compute_features(context, self.features))
        length = cosine.shape[1]
        position = torch.arange(length, device=cosine.device)
        free = context.mergeable.expand(cosine.shape[:2])
        allowed = free.unsqueeze(2) & free.unsqueeze(1) & (position != position.unsqueeze(1))
        cosine = cosine.masked_fill(~allowed, float("-inf"))
        nearest = cosine.argmax(2)
        mutual = allowed.any(2) & (nearest.gather(1, nearest) == position)
        first = mutual & (position < nearest)
        count = first.sum(1).clamp(max=r)
        if not bool(count.any()):
            return None
        best = cosine.gather(2, nearest.unsqueeze(2)).squeeze(2).masked_fill(~first, float("-inf"))
        merges = context.matcher.rank(best) < count.unsqueeze(1)
        joins = mutual & (position > nearest) & merges.gather(1, nearest)
        group = torch.where(joins, nearest, position)
        mask = protected_mask(context.protected, length, group.device)
        return Reduction(context.matcher.place_groups(group, mask, context.present, count))

    def flops(self, tokens: int, head_width: int) -> int:
        return tokens * tokens * head_width
