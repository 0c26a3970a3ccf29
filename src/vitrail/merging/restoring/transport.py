"""Transport: a token that merged moves as its nearest neighbors did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.restoring.base import Restorer, register_restorer
from vitrail.merging.state import MergeState

START, NEIGHBORS, LOST = "transport.start", "transport.neighbors", "transport.lost"
"""Names of the entries that are kept."""


@register_restorer("transport")
class Transport(Restorer):
    """Restore a token as its value when it merged plus the mean change of its nearest neighbors since (IPCV).

    Neighbors are the nearest of the tokens that were left, by Euclidean distance. A position keeps its value less the
    mean of theirs (D channels), and where they are.

    Args:
        neighbors: number of neighbors.
    """

    def __init__(self, neighbors: int = 10) -> None:
        super().__init__()
        if not is_int(neighbors, 1):
            raise InvalidOption(f"neighbors is 1 or more; got {neighbors!r}")
        self.neighbors = neighbors

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.neighbors == 10 else {"neighbors": self.neighbors}

    def keep(
        self, x: Tensor, merged: Tensor, step: Assignment, before: MergeState, after: MergeState
    ) -> Mapping[str, Tensor]:
        members = step.merge_sizes(torch.ones_like(step.target)).gather(1, step.target)
        changed = (members > 1) & (x != step.unmerge(merged)).any(2)
        # without padding, at most two tokens change for each that is removed
        count = x.shape[1] if after.padded else min(x.shape[1], 2 * (x.shape[1] - step.length))
        those = changed.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
        values = _take(x, those)
        nearest = _nearest(values, merged, self.neighbors, after)
        assert after.assignment is not None
        first = after.assignment.first_members().gather(1, nearest.clamp_min(0).flatten(1)).view_as(nearest)
        first = torch.where(nearest < 0, -1, first).to(torch.int32)
        lost = before.to_original(changed.unsqueeze(2))
        places = before.to_original(_put(first, those, x.shape[1]))
        start = before.to_original(_put(values - _mean_of(merged, nearest), those, x.shape[1])) * lost
        if not before.kept:
            return {START: start, NEIGHBORS: places, LOST: lost}
        earlier = before.kept[LOST]
        return {
            START: torch.where(earlier, before.kept[START], start),
            NEIGHBORS: torch.where(earlier, before.kept[NEIGHBORS], places),
            LOST: earlier | lost,
        }

    def insert(self, kept: Mapping[str, Tensor], places: Sequence[int]) -> dict[str, Tensor]:
        found = super().insert(kept, places)
        if NEIGHBORS in found:
            for place in sorted(places):
                found[NEIGHBORS] = found[NEIGHBORS] + (found[NEIGHBORS] >= place)
        return found

    def restore(self, x: Tensor, state: MergeState) -> Tensor:
        assert state.assignment is not None
        places, target = state.kept[NEIGHBORS].long(), state.assignment.target
        groups = target.gather(1, places.clamp_min(0).flatten(1)).view_as(places)
        moved = state.kept[START].to(x.dtype) + _mean_of(x, torch.where(places < 0, -1, groups))
        return torch.where(state.kept[LOST], moved, state.unmerge(x))


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Return the values (B, n, C) at some places (B, k)."""
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _put(values: Tensor, places: Tensor, length: int) -> Tensor:
    """Return zeros (B, length, C) with values (B, k, C) at some places (B, k)."""
    full = values.new_zeros(values.shape[0], length, values.shape[2])
    return full.scatter(1, places.unsqueeze(2).expand_as(values), values)


@torch.no_grad()
def _nearest(x: Tensor, merged: Tensor, count: int, after: MergeState) -> Tensor:
    """Return the nearest groups of each token (B, n, count), special tokens aside; −1 where there are fewer."""
    work = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        distance = torch.cdist(x.to(work), merged.to(work))
    absent = torch.arange(merged.shape[1], device=x.device) < after.special
    if after.padded and after.size is not None:
        absent = absent | (after.size == 0)
    distance = distance.masked_fill(absent.expand(x.shape[0], -1).unsqueeze(1), torch.inf)
    found, nearest = distance.topk(min(count, merged.shape[1]), dim=2, largest=False)
    nearest = torch.where(found.isinf(), -1, nearest)
    missing = count - nearest.shape[2]
    return torch.nn.functional.pad(nearest, (0, missing), value=-1) if missing else nearest


def _mean_of(values: Tensor, places: Tensor) -> Tensor:
    """Return the mean of the values (B, m, D) at some places (B, n, k) for each token; −1 counts for nothing."""
    work = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros((), dtype=work, device=values.device)
    for column in places.unbind(2):
        index = column.clamp_min(0).unsqueeze(2).expand(-1, -1, values.shape[2])
        total = total + values.gather(1, index).to(work) * (column >= 0).unsqueeze(2)
    return (total / (places >= 0).sum(2, keepdim=True).clamp_min(1)).to(values.dtype)
