"""MCTF: Multi-Criteria Token Fusion (Lee et al., CVPR 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import REFERENCE, Matcher, Protected, protected_mask, similarity
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods.pairs._pairs import limit

DEFAULTS = {"features": "tokens", "tau_similarity": 1.0, "tau_information": 20.0, "tau_size": 40.0}


@register_method("mctf")
class MCTF(Method):
    """Merge the r pairs that are similar, receive little attention, and are small.

    A pair scores ``((cos + 1) / 2)^(1/τs) · (ã_i ã_j)^(1/τi) · (s̃_i s̃_j)^(1/τz)``, where ã and s̃ are the inverse
    attention that a token receives and its inverse size, each divided by its maximum. Even positions are A, odd ones
    B. The best half of the merges (rounded up) goes from A to B as in ToMe, the other half from B, with all that it
    received, to what remains of A, by the same scores. A group becomes its mean weighted by attention × size.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        tau_similarity: temperature τs of the similarity; larger values let it count less.
        tau_information: temperature τi of the attention received.
        tau_size: temperature τz of the size.
    """

    places_groups = True
    takes_padding = True

    def __init__(
        self,
        features: Features = "tokens",
        tau_similarity: float = 1.0,
        tau_information: float = 20.0,
        tau_size: float = 40.0,
    ) -> None:
        super().__init__()
        self.features = check_features(features)
        taus = {"tau_similarity": tau_similarity, "tau_information": tau_information, "tau_size": tau_size}
        for name, value in taus.items():
            if not is_number(value) or value <= 0:
                raise InvalidOption(f"{name} is a temperature, a number above 0; got {value!r}")
        self.tau_similarity, self.tau_information, self.tau_size = map(float, taus.values())

    @property
    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in DEFAULTS}
        return {name: value for name, value in given.items() if value != DEFAULTS[name]}

    def capacity(self, tokens: int, protected: Protected) -> int:
        if isinstance(protected, int):
            sources, destinations = (tokens + 1) // 2 - (protected + 1) // 2, tokens // 2 - protected // 2
            return max(1, min(2 * (sources - 1), 2 * destinations + 1)) if sources > 0 and destinations > 0 else 0
        return int(_most((~protected)[:, ::2].sum(1), (~protected)[:, 1::2].sum(1)).min())

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        work = torch.promote_types(context.x.dtype, torch.float32)
        attention = context.attention().mean(1).to(work).clamp(min=torch.finfo(work).tiny)
        size = torch.ones_like(attention) if context.size is None else context.size
        scores = self.score(context, attention, size.to(work))
        free = context.mergeable.expand(attention.shape)
        count = limit(r, _most(free[:, ::2].sum(1), free[:, 1::2].sum(1)), context.present)
        first = (count + 1) // 2
        group = merge_both_ways(scores, first, count - first, context.matcher)
        mask = protected_mask(context.protected, group.shape[1], group.device)
        step = context.matcher.place_groups(group, mask, context.present, count)
        return Reduction(step, weight=attention * size, size=size)

    def score(self, context: Context, attention: Tensor, size: Tensor) -> Tensor:
        """Return the score of each even token with each odd one (B, A, C); −inf where either must not merge."""
        with torch.autocast(context.x.device.type, enabled=False):
            free = context.mergeable.expand(attention.shape)
            features = compute_features(context, self.features)
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            alike = (similarity(features, torch.zeros_like(free)).clamp(min=-1) + 1) / 2
            calm = _inverse(attention, free) ** (1 / self.tau_information) * _inverse(size, free) ** (1 / self.tau_size)
            scores = alike.clamp(min=0) ** (1 / self.tau_similarity) * calm[:, ::2].unsqueeze(2) * calm[:, None, 1::2]
            return scores.masked_fill(~(free[:, ::2].unsqueeze(2) & free[:, None, 1::2]), float("-inf"))

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def merge_both_ways(scores: Tensor, first: int | Tensor, second: int | Tensor, matcher: Matcher = REFERENCE) -> Tensor:
    """Merge the ``first`` best even tokens into odd ones, then the ``second`` best odd ones into remaining even ones.

    Returns the position (B, N) of the member that names each token's group. Ties go to the lower index.
    """
    batch, even, odd = scores.shape
    position = torch.arange(even + odd, device=scores.device).expand(batch, -1)
    best, partner = _best(scores)
    moves = matcher.rank(best) < _per_image(first)
    group = position.clone()
    group[:, ::2] = torch.where(moves, 2 * partner + 1, position[:, ::2])
    best, partner = _best(scores.masked_fill(moves.unsqueeze(2), float("-inf")).transpose(1, 2))
    moves = matcher.rank(best) < _per_image(second)
    group[:, 1::2] = torch.where(moves, 2 * partner, position[:, 1::2])
    return group.gather(1, group)


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    partner = scores.argmax(2)
    return scores.gather(2, partner.unsqueeze(2)).squeeze(2), partner


def _per_image(count: int | Tensor) -> int | Tensor:
    return count if isinstance(count, int) else count.unsqueeze(1)


def _inverse(values: Tensor, free: Tensor) -> Tensor:
    """Return the inverse of values (B, N), divided by its maximum over the tokens that may merge; 1 elsewhere."""
    least = values.masked_fill(~free, float("inf")).amin(1, keepdim=True)
    return (least / values).masked_fill(~free, 1)


def _most(sources: Tensor, destinations: Tensor) -> Tensor:
    """Return the most merges both ways where one even token must remain for the second half."""
    both = torch.minimum(2 * (sources - 1), 2 * destinations + 1).clamp(min=1)
    return both * (sources > 0) * (destinations > 0)
