"""Bipartite matching: which tokens merge into which.

Shapes: B batch, N tokens, A/C tokens at even / odd positions, D features.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.merging.assignment import Assignment

Order = Literal["paper", "original"]
Protected = int | Tensor
"""Which tokens may not merge: that many in front, or a boolean mask (1 or B, N)."""


def protected_mask(protected: Protected, length: int, device: torch.device) -> Tensor:
    """Give the protection as a boolean mask (1 or B, N)."""
    if isinstance(protected, int):
        return (torch.arange(length, device=device) < protected).unsqueeze(0)
    return protected


def front_edges(length: int, protected: int) -> int:
    """Most merges that one step allows when exactly the first ``protected`` tokens are protected.

    Half of the unprotected tokens, rounded down: then enough even positions are free, and where there are
    two unprotected tokens there is an odd position for them to go to.
    """
    return max(0, (length - protected) // 2)


def mask_edges(mask: Tensor) -> Tensor:
    """Most merges that one step allows under each mask of (B, N): (B,) counts."""
    free = ~mask
    sources, destinations = free[:, ::2].sum(1), free[:, 1::2].sum(1)
    return torch.minimum(sources * (destinations > 0), free.sum(1) // 2)


def similarity(metric: Tensor, protected: Tensor) -> Tensor:
    """Cosine of every even token with every odd one (B, A, C); −inf wherever either of them is protected.

    Where features are not finite the pair is the least similar one that may still merge, so that a broken
    picture in a batch never changes how many tokens are left.
    """
    unit = F.normalize(metric, dim=-1)
    scores = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    scores = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, scores)
    blocked = protected[:, ::2].unsqueeze(2) | protected[:, 1::2].unsqueeze(1)
    return scores.masked_fill(blocked, float("-inf"))


def rank(values: Tensor) -> Tensor:
    """Place of each value of (B, A) in descending order, 0 for the largest; equal values by lower index.

    Counted by comparing all pairs: the same as a stable sort, in one operation that also exports.
    """
    index = torch.arange(values.shape[1], device=values.device)
    here, other = values.unsqueeze(2), values.unsqueeze(1)
    before = (other > here) | ((other == here) & (index < index.unsqueeze(1)))
    return before.sum(2)


@torch.no_grad()
def match(metric: Tensor, r: int, protected: Protected = 0, order: Order = "paper") -> Assignment:
    """Merge the ``r`` most similar pairs of an even and an odd token, as Token Merging does.

    Tokens at even positions are sources, those at odd positions destinations. Each source picks its most
    similar destination, and the ``r`` best of these edges merge; several sources may share a destination.
    Ties go to the lower index, for the choice of a destination and for the choice of edges. Protected tokens
    neither move nor receive.

    The caller keeps ``r`` within :func:`front_edges` or :func:`mask_edges`; beyond them, edges that do not
    exist would be taken.

    Args:
        metric: features (B, N, D) to compare; compared in float32 or better.
        r: how many tokens to merge away; with 0 nothing moves.
        protected: tokens that may not merge.
        order: ``"paper"`` puts protected tokens first, then remaining sources, then destinations, each in
            their order; ``"original"`` sorts groups by their first member.
    """
    batch, length, _ = metric.shape
    if r == 0:
        return Assignment.identity(batch, length, metric.device)
    with torch.autocast(metric.device.type, enabled=False):
        metric = metric.to(torch.promote_types(metric.dtype, torch.float32))
        mask = protected_mask(protected, length, metric.device)
        scores = similarity(metric, mask)
        partner = scores.argmax(2)
        best = scores.gather(2, partner.unsqueeze(2)).squeeze(2)
        merges = rank(best) < r

        position = torch.arange(length, device=metric.device).expand(batch, length)
        # group[i]: the position whose token i ends up in, its own unless it merges away
        group = position.clone()
        group[:, ::2] = torch.where(merges, 2 * partner + 1, position[:, ::2])
        placed = _place_by_kind(group, mask) if order == "paper" else _place_by_first_member(group)
        return Assignment(placed, length - r)


def _place_by_kind(group: Tensor, mask: Tensor) -> Tensor:
    """New position of every token: protected first, then remaining even positions, then odd ones."""
    length = group.shape[1]
    position = torch.arange(length, device=group.device)
    even = position % 2 == 0
    stays = group == position
    kinds = [mask & stays, stays & even & ~mask, stays & ~even & ~mask]
    place = torch.zeros_like(group)
    start = torch.zeros_like(group[:, :1])
    for kind in kinds:
        count = kind.long().cumsum(1)
        place = torch.where(kind, start + count - 1, place)
        start = start + count[:, -1:]
    return place.gather(1, group)


def _place_by_first_member(group: Tensor) -> Tensor:
    """New position of every token: groups in the order of their first member."""
    position = torch.arange(group.shape[1], device=group.device).expand_as(group)
    first = position.scatter_reduce(1, group, position, "amin")
    leads = first.gather(1, group) == position
    place = leads.long().cumsum(1) - 1
    return place.gather(1, first.gather(1, group))
