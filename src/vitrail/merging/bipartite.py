"""Bipartite soft matching (ToMe): every second token is a source, and the most similar pairs merge.

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
"""Tokens that must not merge: that many in front, or a boolean mask (1 or B, N)."""


def protected_mask(protected: Protected, length: int, device: torch.device) -> Tensor:
    """Return the protection as a boolean mask (1 or B, N)."""
    if isinstance(protected, int):
        return (torch.arange(length, device=device) < protected).unsqueeze(0)
    return protected


def blocked_mask(protected: Protected, present: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return the tokens that cannot merge (1 or B, N): protected ones and padding."""
    mask = protected_mask(protected, length, device)
    return mask if present is None else mask | ~present


def front_edges(length: int, protected: int) -> int:
    """Return the most merges that one step allows when the first ``protected`` tokens are protected.

    Half of the unprotected tokens, rounded down: then enough even positions are free, and where there are two
    unprotected tokens one of them is at an odd position.
    """
    return max(0, (length - protected) // 2)


def mask_edges(mask: Tensor) -> Tensor:
    """Return the most merges that one step allows under each protection mask of (B, N): (B,)."""
    free = ~mask
    sources, destinations = free[:, ::2].sum(1), free[:, 1::2].sum(1)
    return torch.minimum(sources * (destinations > 0), free.sum(1) // 2)


def similarity(metric: Tensor, blocked: Tensor) -> Tensor:
    """Return the cosine of every even token with every odd one (B, A, C); −inf where either is blocked.

    Where features are not finite, the pair gets the lowest finite score, so that a broken image in a batch never
    changes how many tokens are left.
    """
    unit = F.normalize(metric, dim=-1)
    scores = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    scores = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, scores)
    pairs = blocked[:, ::2].unsqueeze(2) | blocked[:, 1::2].unsqueeze(1)
    return scores.masked_fill(pairs, float("-inf"))


def rank(values: Tensor) -> Tensor:
    """Return the rank of each value of (B, A) in descending order, 0 for the largest; ties go to the lower index.

    Counts comparisons of all pairs: equal to a stable sort, in one operation that also exports to ONNX.
    """
    index = torch.arange(values.shape[1], device=values.device)
    here, other = values.unsqueeze(2), values.unsqueeze(1)
    before = (other > here) | ((other == here) & (index < index.unsqueeze(1)))
    return before.sum(2)


@torch.no_grad()
def match(
    metric: Tensor,
    r: int | Tensor,
    protected: Protected = 0,
    order: Order = "paper",
    present: Tensor | None = None,
    penalty: Tensor | None = None,
) -> Assignment:
    """Merge the ``r`` most similar pairs of an even and an odd token.

    Tokens at even positions are sources, tokens at odd positions destinations. Each source picks its most similar
    destination, and the ``r`` best of these edges merge; several sources may share a destination. Ties go to the
    lower index, both for the choice of a destination and for the choice of edges. Protected tokens neither move nor
    receive.

    Args:
        metric: features (B, N, D) to compare; compared in float32 or better.
        r: number of tokens to merge away, for the whole batch or per image (B,). A single number must stay within
            :func:`front_edges` or :func:`mask_edges`; counts per image are clipped to them.
        protected: tokens that must not merge.
        order: ``"paper"`` puts protected tokens first, then remaining sources, then destinations, each in their order;
            ``"original"`` sorts groups by their first member.
        present: False for padding (B, N), which must come last; None where there is none.
        penalty: subtracted from the similarities of each token (B, N); None for none.
    """
    batch, length, _ = metric.shape
    if isinstance(r, int) and r == 0 and present is None:
        return Assignment.identity(batch, length, metric.device)
    blocked = blocked_mask(protected, present, length, metric.device)
    with torch.autocast(metric.device.type, enabled=False):
        scores = similarity(metric.to(torch.promote_types(metric.dtype, torch.float32)), blocked)
        if penalty is not None:
            scores = scores - penalty[:, ::2].unsqueeze(2) - penalty[:, 1::2].unsqueeze(1)
    return match_scores(scores, r, protected, order, present)


@torch.no_grad()
def match_scores(
    scores: Tensor, r: int | Tensor, protected: Protected = 0, order: Order = "paper", present: Tensor | None = None
) -> Assignment:
    """Merge the ``r`` best pairs of an even and an odd token, by scores (B, A, C): −inf where either cannot merge.

    The same as :func:`match`, which scores pairs by the cosine of their features.
    """
    batch, length = scores.shape[0], scores.shape[1] + scores.shape[2]
    if isinstance(r, int) and r == 0 and present is None:
        return Assignment.identity(batch, length, scores.device)
    found = match_edges(*best_edges(scores), r, length, protected, present)
    return found if order == "paper" else found.by_first_member()


def best_edges(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best score (B, A) of each even token, and the odd token it is with; ties go to the lower index."""
    partner = scores.argmax(2)
    return scores.gather(2, partner.unsqueeze(2)).squeeze(2), partner


def match_edges(
    best: Tensor, partner: Tensor, r: int | Tensor, length: int, protected: Protected, present: Tensor | None
) -> Assignment:
    """Merge the ``r`` best of these edges (B, A), as :func:`match_scores` does in the paper's order."""
    mask = protected_mask(protected, length, best.device)
    if isinstance(r, Tensor):
        r = torch.minimum(r, mask_edges(blocked_mask(protected, present, length, best.device)))
    merges = rank(best) < (r if isinstance(r, int) else r.unsqueeze(1))

    position = torch.arange(length, device=best.device).expand(best.shape[0], length)
    # group[i]: the position whose token i ends up in, its own unless it merges away
    group = position.clone()
    group[:, ::2] = torch.where(merges, 2 * partner + 1, position[:, ::2])
    return place_groups(group, mask, present, r)


def place_groups(group: Tensor, mask: Tensor, present: Tensor | None, r: int | Tensor) -> Assignment:
    """Return the assignment of groups in ToMe's order: protected tokens, even positions, odd ones, padding.

    Args:
        group: for each token, the position (B, N) of the member that names its group; that member names itself.
        mask: protected tokens (1 or B, N).
        present: False for padding (B, N), which must come last; None where there is none.
        r: number of tokens that merge away, for the whole batch or per image (B,).
    """
    if isinstance(r, int) and present is None:
        return Assignment(place_by_kind(group, mask), group.shape[1] - r)
    return Assignment(*_place_present(group, mask, present, r))


def cosines(features: Tensor) -> Tensor:
    """Return the cosine of every pair of tokens (B, N, N), in float32 or better.

    Where features are not finite, the pair gets the lowest finite score, so that a broken image in a batch never
    changes how many tokens are left.
    """
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
        cosine = unit @ unit.transpose(1, 2)
        return torch.where(cosine.isnan(), torch.finfo(cosine.dtype).min, cosine)


SAMPLES = 9
"""Points on the line between two tokens, its ends included, at which a map is read."""


def strongest_between(values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return the highest value of a map (B, h, w) on the lines from places (B, A, 2) to places (B, C, 2): (B, A, C)."""
    height, width = values.shape[1:]
    flat, found = values.flatten(1), None
    for sample in range(SAMPLES):
        share = sample / (SAMPLES - 1)
        point = sources.unsqueeze(2) * (1 - share) + destinations.unsqueeze(1) * share
        row = (point[..., 0] + 0.5).floor().clamp(0, height - 1)
        column = (point[..., 1] + 0.5).floor().clamp(0, width - 1)
        index = (row * width + column).long()
        value = flat.gather(1, index.flatten(1)).view_as(index)
        found = value if found is None else torch.maximum(found, value)
    assert found is not None
    return found


class Pairs:
    """The cosines of all pairs of tokens by features (B, N, D)."""

    def __init__(self, metric: Tensor) -> None:
        self.cosine = cosines(metric)

    def affinity(self, margin: float, among: Tensor) -> Tensor:
        """Sum ELU(cos − margin) of each token (B, N) with some tokens (B, N)."""
        return F.elu(self.cosine - margin).masked_fill(~among.unsqueeze(1), 0).sum(2)

    def nearest(self, among: Tensor) -> Tensor:
        """Return which of some tokens (B, N) is the most similar to each token (B, N); ties go to the lower index."""
        return self.cosine.masked_fill(~among.unsqueeze(1), float("-inf")).argmax(2)


class Matcher:
    """The steps of a matching, as methods reach them by ``context.matcher``: these functions, or their fused twins."""

    def match(
        self,
        metric: Tensor,
        r: int | Tensor,
        protected: Protected = 0,
        present: Tensor | None = None,
        penalty: Tensor | None = None,
    ) -> Assignment:
        """See :func:`match`."""
        return match(metric, r, protected, present=present, penalty=penalty)

    def match_scores(
        self, scores: Tensor, r: int | Tensor, protected: Protected = 0, present: Tensor | None = None
    ) -> Assignment:
        """See :func:`match_scores`."""
        return match_scores(scores, r, protected, present=present)

    def best_edges(self, metric: Tensor, protected: Protected, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :func:`best_edges`; edges are cosines of features (B, N, D)."""
        blocked = blocked_mask(protected, present, metric.shape[1], metric.device)
        with torch.autocast(metric.device.type, enabled=False):
            return best_edges(similarity(metric.to(torch.promote_types(metric.dtype, torch.float32)), blocked))

    def match_edges(
        self, best: Tensor, partner: Tensor, r: int | Tensor, length: int, protected: Protected, present: Tensor | None
    ) -> Assignment:
        """See :func:`match_edges`."""
        return match_edges(best, partner, r, length, protected, present)

    def pairs(self, metric: Tensor) -> Pairs:
        """See :class:`Pairs`."""
        return Pairs(metric)

    def place_groups(self, group: Tensor, mask: Tensor, present: Tensor | None, r: int | Tensor) -> Assignment:
        """See :func:`place_groups`."""
        return place_groups(group, mask, present, r)

    def strongest_between(self, values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        """See :func:`strongest_between`."""
        return strongest_between(values, sources, destinations)

    def rank(self, values: Tensor) -> Tensor:
        """See :func:`rank`."""
        return rank(values)


REFERENCE = Matcher()


def place_by_kind(group: Tensor, mask: Tensor, present: Tensor | None = None) -> Tensor:
    """Return the new position of every token: protected first, then remaining even positions, then odd ones."""
    length = group.shape[1]
    position = torch.arange(length, device=group.device)
    even = position % 2 == 0
    stays = group == position if present is None else (group == position) & present
    kinds = [mask & stays, stays & even & ~mask, stays & ~even & ~mask]
    place = torch.zeros_like(group)
    start = torch.zeros_like(group[:, :1])
    for kind in kinds:
        count = kind.long().cumsum(1)
        place = torch.where(kind, start + count - 1, place)
        start = start + count[:, -1:]
    return place.gather(1, group)


def _place_present(group: Tensor, mask: Tensor, present: Tensor | None, r: int | Tensor) -> tuple[Tensor, int]:
    """Place the tokens of images that keep different numbers of them; padding goes behind."""
    if present is None:
        present = torch.ones_like(group, dtype=torch.bool)
    kept = present.sum(1) - r
    length = int(kept.max())
    placed = place_by_kind(group, mask, present)
    return torch.where(present, placed, kept.clamp(max=length - 1).unsqueeze(1)), length
