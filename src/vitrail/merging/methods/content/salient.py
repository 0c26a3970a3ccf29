"""Salient: the background merges first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import Protected
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, ModelShape, Reduction, register_method
from vitrail.merging.methods._groups import positions_like
from vitrail.merging.methods.content.importance import (
    MOTION,
    check_importance,
    check_model,
    importance_of,
    motion_map,
)


@register_method("salient")
class Salient(Method):
    """Merge similar pairs of unimportant tokens first.

    The score of a pair is ``cosine − strength·(importance_i + importance_j) / 2``, with the importance scaled to 0 … 1
    in each image. Pairs are those of ToMe's matching among the tokens that may merge.

    Args:
        importance: ``"class_attention"``, ``"received_attention"``, ``"attention_entropy"``, ``"norm"``, ``"motion"``
            (of videos), or the name of a map passed by ``merging.guide(name=...)``, such as a mask.
        strength: weight of the importance against the similarity; 0 is ToMe by similarity alone.
        keep: share of the mergeable tokens, the most important, that do not merge in a layer.
        features: features to compare; see ``vitrail.merging.FEATURES``.
    """

    def __init__(
        self,
        importance: str = "received_attention",
        *,
        strength: float = 0.25,
        keep: float = 0.0,
        features: Features = "keys",
    ) -> None:
        super().__init__()
        self.importance, self.features = check_importance(importance), check_features(features)
        if not is_number(strength) or strength < 0:
            raise InvalidOption(f"strength is 0 or more; got {strength!r}")
        if not is_number(keep) or not 0 <= keep < 1:
            raise InvalidOption(
                f"keep is the share of the tokens that never merge, from 0 to below 1 (of the method, not of "
                f"vitrail.merge); got {keep!r}"
            )
        self.strength, self.keep = float(strength), float(keep)

    @property
    def options(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("importance", "strength", "keep", "features")}
        defaults = {"importance": "received_attention", "strength": 0.25, "keep": 0.0, "features": "keys"}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def check(self, shape: ModelShape) -> None:
        check_model(self.importance, shape)

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        return {MOTION: motion_map(inputs, grid)} if self.importance == "motion" else {}

    def capacity(self, tokens: int, protected: Protected) -> int:
        count = protected if isinstance(protected, int) else int(protected.sum(1).max())
        free = max(0, tokens - count)
        return (free - self._kept(free)) // 2

    def _kept(self, free: int) -> int:
        return int(self.keep * free)

    def _kept_of(self, context: Context, candidates: Tensor) -> int | Tensor:
        """Return how many candidates (B, N) do not merge: one number, or one per image (B, 1) where they differ."""
        if isinstance(context.protected, int) and context.present is None:
            return self._kept(candidates.shape[1] - context.protected)
        return (candidates.sum(1, keepdim=True).double() * self.keep).floor()

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        features = compute_features(context, self.features)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            importance = importance_of(context, self.importance).to(features.dtype)
            candidates = context.mergeable.expand(importance.shape)
            if self.keep:
                count = self._kept_of(context, candidates)
                rank = importance.masked_fill(~candidates, -1).argsort(dim=1, descending=True, stable=True).argsort(1)
                candidates = candidates & (rank >= count)
            return Reduction(match_among(features, candidates, r, context, self.strength * importance / 2))

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def match_among(features: Tensor, candidates: Tensor, r: int | Tensor, context: Context, penalty: Tensor) -> Assignment:
    """Merge the best pairs of these tokens (B, N) alone, by their cosine minus a penalty of each token (B, N).

    Candidates alternate between sources and destinations whatever stands between them, so that half of them can
    merge.
    """
    place = context.matcher.rank(candidates.float())  # candidates in front, padding stays behind
    order = torch.zeros_like(place).scatter(1, place, positions_like(place))
    blocked, present = ~candidates.gather(1, order), context.present
    if present is not None:
        present = present.gather(1, order)
        blocked = blocked & present
    found = context.matcher.match(
        features.gather(1, order.unsqueeze(2).expand_as(features)), r, blocked, present, penalty.gather(1, order)
    )
    return Assignment(found.target.gather(1, place), found.length)
