"""Assignment: where each token went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """An index map from positions before a merge to positions after it.

    ``target`` is (B, N) long with values in ``range(length)``: the token at position ``i`` went into the token
    at position ``target[:, i]``. Every new position has at least one member. Maps compose (:meth:`then`), so
    that the merges of all layers are one map, and no N × N matrix ever exists.

    >>> pairs = Assignment(torch.tensor([[0, 1, 1, 2]]), 3)
    >>> pairs.merge(torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])).squeeze(-1)
    tensor([[1., 3., 8.]])
    """

    target: Tensor
    length: int

    @classmethod
    def identity(cls, batch: int, length: int, device: torch.device | str | None = None) -> Assignment:
        """Build the map that leaves every token where it is."""
        return cls(torch.arange(length, device=device).expand(batch, length), length)

    def merge_sizes(self, size: Tensor) -> Tensor:
        """Add up the sizes (B, N) of the members of each group: (B, length)."""
        return size.new_zeros(size.shape[0], self.length).scatter_add(1, self.target, size)

    def merge(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """Give the size-weighted mean of each group's members: (B or 1, N, D) becomes (B, length, D).

        Sums run in float32 at least. A group of one member is copied exactly: its weight is 1.
        """
        work = torch.promote_types(x.dtype, torch.float32)
        if size is None:
            size = torch.ones(self.target.shape, dtype=work, device=x.device)
        weight = size / self.merge_sizes(size).gather(1, self.target)
        weighted = x.to(work) * weight.to(work).unsqueeze(-1)
        merged = weighted.new_zeros(weighted.shape[0], self.length, x.shape[2])
        return merged.scatter_add(1, self._index(x.shape[2]), weighted).to(x.dtype)

    def merge_all(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge tokens and sizes (None for all one) at once; gives both, and log₂ of the sizes where it is free."""
        if size is None:
            size = torch.ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return self.merge(x, size), self.merge_sizes(size), None

    def unmerge(self, x: Tensor) -> Tensor:
        """Give every old position the token of its group: (B, length, D) becomes (B, N, D)."""
        return x.gather(1, self._index(x.shape[2]))

    def then(self, later: Assignment) -> Assignment:
        """Compose: first this map, then ``later``, which starts where this one ends."""
        return Assignment(later.target.gather(1, self.target), later.length)

    def insert(self, places: Sequence[int]) -> Assignment:
        """Give the map for sequences that have one more token at each of these places, before as after.

        The tokens in front of the last place must not have moved.
        """
        length = self.length + len(places)
        moved = self.target
        for place in sorted(places):
            moved = moved + (moved >= place)
        return Assignment(insert(moved, places, places), length)

    def _index(self, channels: int) -> Tensor:
        return self.target.unsqueeze(-1).expand(-1, -1, channels)


def insert(values: Tensor, places: Sequence[int], new: Sequence[float]) -> Tensor:
    """Put a new value at each of these places of the result into a sequence (B, N, …)."""
    pieces, start = [], 0
    for before, (place, value) in enumerate(sorted(zip(places, new, strict=True))):
        pieces.append(values[:, start : place - before])
        pieces.append(values.new_full((values.shape[0], 1, *values.shape[2:]), value))
        start = place - before
    return torch.cat([*pieces, values[:, start:]], 1)
