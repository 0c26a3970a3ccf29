"""Checks of a matching: its lists are consistent, and its merges are the best ones."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.merging.bipartite import protected_mask, similarity


def partners(target: Tensor, r: int, protected: int) -> tuple[Tensor, Tensor]:
    """Read a matching's edges (B, A) off its target: which even tokens merged, and into which odd one."""
    length = target.shape[1]
    free_odds = length // 2 - protected // 2
    first_odd = length - r - free_odds
    even = torch.arange(0, length, 2, device=target.device)
    place = target[:, ::2]
    merged = (place >= first_odd) & (even >= protected)
    return merged, torch.where(merged, place - first_odd + protected // 2, 0)


def check_places(target: Tensor, r: int, protected: int) -> None:
    """Check that protected tokens come first, then even ones that stay, then odd ones, each in their order."""
    length = target.shape[1]
    merged, partner = partners(target, r, protected)
    position = torch.arange(length, device=target.device)
    for row, merged_row, into in zip(target, merged, partner, strict=True):
        assert int(merged_row.sum()) == r, f"{int(merged_row.sum())} tokens merged instead of {r}"
        stays = torch.ones(length, dtype=torch.bool, device=target.device)
        stays[::2] = ~merged_row
        free = position >= protected
        even = position % 2 == 0
        order = torch.cat([position[~free], position[stays & even & free], position[~even & free]])
        place = torch.full_like(position, -1)
        place[order] = torch.arange(len(order), device=target.device)
        group = position.clone()
        group[::2] = torch.where(merged_row, 2 * into + 1, position[::2])
        assert torch.equal(row, place[group]), "tokens stand in another order"


def check_lists(target: Tensor, member: Tensor, start: Tensor) -> None:
    """Check that the members of each group are listed once: the one that stays, then the others in their order."""
    length = target.shape[1]
    position = torch.arange(length, device=target.device)
    assert bool((start[:, 0] == 0).all()), "the first group does not begin at 0"
    assert bool((start[:, -1] == length).all()), "the last group does not end at the last member"
    assert bool((start.diff(dim=1) > 0).all()), "a group has no members, or begins before the one in front of it"
    assert torch.equal(member.sort(1).values, position.expand_as(member)), "the members are no permutation"
    for row, listed, begins in zip(target, member, start, strict=True):
        counts = begins.diff()
        group = torch.repeat_interleave(torch.arange(len(counts), device=target.device), counts)
        assert torch.equal(row[listed], group), "a token is listed in another group than it goes to"
        leader = torch.zeros(length, dtype=torch.bool, device=target.device)
        leader[begins[:-1]] = True
        several = counts > 1
        assert bool((listed[begins[:-1]][several] % 2 == 1).all()), "a group's first member is not the one that stays"
        follows = ~leader[1:] & ~leader[:-1]
        assert bool((listed.diff()[follows] > 0).all()), "a group's members are not in their order"


def shortfall(metric: Tensor, target: Tensor, r: int, protected: int, limit: float) -> tuple[float, Tensor]:
    """Return by how much the similarity of a chosen edge falls short of one that should have been chosen instead.

    Also gives the images (B,) in which two similarities are so near to each other, but not equal, that rounding may
    decide between them. Everywhere else there is only one right matching.
    """
    scores = similarity(metric, protected_mask(protected, metric.shape[1], metric.device))
    merged, partner = partners(target, r, protected)
    best = scores.amax(2)
    lost = (best - scores.gather(2, partner.unsqueeze(2)).squeeze(2))[merged]
    ranked = best.sort(1, descending=True).values
    last = ranked[:, r - 1]
    unranked = torch.relu(last.unsqueeze(1) - best)[merged]
    short = max(float(lost.max()), float(unranked.max()))

    unclear = torch.zeros(len(metric), dtype=torch.bool, device=metric.device)
    if scores.shape[2] > 1:
        two = scores.topk(2, 2).values
        unclear |= _near(two[..., 0] - two[..., 1], limit).any(1)
    if r < ranked.shape[1]:
        unclear |= _near(last - ranked[:, r], limit)
    return short, unclear


def _near(gap: Tensor, limit: float) -> Tensor:
    return (gap > 0) & (gap < limit)
