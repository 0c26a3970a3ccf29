"""Assignment: the index map of a reduction, from positions before it to positions after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """An index map from positions before a reduction to positions after it.

    ``target`` is (B, N) long with values in ``range(length)``: the token at position ``i`` goes to the group at
    position ``target[:, i]``. Maps compose (:meth:`then`), so the reductions of all layers are one map, and no N × N
    matrix is ever built. A group without members, or whose members all weigh 0, becomes a zero token of size 0: it is
    padding.

    >>> pairs = Assignment(torch.tensor([[0, 1, 1, 2]]), 3)
    >>> pairs.merge(torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])).squeeze(-1)
    tensor([[1., 3., 8.]])
    """

    target: Tensor
    length: int

    @classmethod
    def identity(cls, batch: int, length: int, device: torch.device | str | None = None) -> Assignment:
        """Return the map that leaves every token in place."""
        return cls(torch.arange(length, device=device).expand(batch, length), length)

    def merge_sizes(self, size: Tensor) -> Tensor:
        """Sum the sizes (B, N) of each group's members: (B, length)."""
        return size.new_zeros(size.shape[0], self.length).scatter_add(1, self.target, size)

    def merge(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the weighted mean of each group: (B or 1, N, D) becomes (B, length, D).

        Weights (B, N) default to 1. Sums are computed in float32 or better. A group of one member is copied exactly.
        """
        work = torch.promote_types(x.dtype, torch.float32)
        if weight is None:
            weight = torch.ones(self.target.shape, dtype=work, device=x.device)
        total = self.merge_sizes(weight).gather(1, self.target)
        share = weight / total.masked_fill(total == 0, 1)
        weighted = x.to(work) * share.to(work).unsqueeze(-1)
        empty = weighted.new_zeros(weighted.shape[0] * self.length, x.shape[2])
        merged = empty.index_add(0, self._rows(), weighted.flatten(0, 1))
        return merged.view(weighted.shape[0], self.length, x.shape[2]).to(x.dtype)

    def merge_all(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge tokens and sizes (None: all 1); return both, and log₂ of the sizes where a kernel computes it."""
        if size is None:
            size = torch.ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return self.merge(x, size), self.merge_sizes(size), None

    def unmerge(self, x: Tensor) -> Tensor:
        """Copy each group's token to its members: (B, length, D) becomes (B, N, D)."""
        return x.flatten(0, 1).index_select(0, self._rows()).view(*self.target.shape, x.shape[2])

    def then(self, later: Assignment) -> Assignment:
        """Compose: this map first, then ``later``, which starts where this one ends."""
        return Assignment(later.target.gather(1, self.target), later.length)

    def lengthened(self, length: int) -> Assignment:
        """Return the same groups, and empty ones behind them."""
        return replace(self, length=length)

    def by_first_member(self) -> Assignment:
        """Return the same groups in the order of their first member; groups without members come last."""
        first = self.first_members().gather(1, self.target)
        position = torch.arange(self.target.shape[1], device=self.target.device)
        place = (first == position).long().cumsum(1) - 1
        return Assignment(place.gather(1, first), self.length)

    def first_members(self) -> Tensor:
        """Return the first position of each group (B, length); the number of positions for groups without members."""
        position = torch.arange(self.target.shape[1], device=self.target.device).expand_as(self.target)
        first = position.new_full((position.shape[0], self.length), position.shape[1])
        return first.scatter_reduce(1, self.target, position, "amin")

    def best_members(self, rating: Tensor) -> Tensor:
        """Return True for the member with the highest rating (B, N) of each group; ties go to the lower index."""
        best = rating.new_full((rating.shape[0], self.length), -torch.inf).scatter_reduce(
            1, self.target, rating, "amax"
        )
        position = torch.arange(rating.shape[1], device=rating.device).expand_as(rating)
        candidate = torch.where(rating == best.gather(1, self.target), position, rating.shape[1])
        first = candidate.new_full(best.shape, rating.shape[1]).scatter_reduce(1, self.target, candidate, "amin")
        return first.gather(1, self.target) == position

    def insert(self, places: Sequence[int]) -> Assignment:
        """Return the map for sequences with one more token at each of these places, before and after the map.

        The tokens in front of the last place must not have moved.
        """
        length = self.length + len(places)
        moved = self.target
        for place in sorted(places):
            moved = moved + (moved >= place)
        return Assignment(insert(moved, places, places), length)

    def _rows(self) -> Tensor:
        """Return the group of every token of the batch (B·N), counted through all images.

        Whole rows are several times faster to add and to copy on a CPU than single values by an index (B, N, D).
        """
        first = torch.arange(self.target.shape[0], device=self.target.device) * self.length
        return (self.target + first.unsqueeze(1)).flatten()


def insert(values: Tensor, places: Sequence[int], new: Sequence[float]) -> Tensor:
    """Insert one new value at each of these places (counted in the result) of a sequence (B, N, …)."""
    pieces, start = [], 0
    for before, (place, value) in enumerate(sorted(zip(places, new, strict=True))):
        pieces.append(values[:, start : place - before])
        pieces.append(values.new_full((values.shape[0], 1, *values.shape[2:]), value))
        start = place - before
    return torch.cat([*pieces, values[:, start:]], 1)
