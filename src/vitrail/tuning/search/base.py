"""The problem that searches solve: schedules, their cost, and how far they move the model's outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vitrail.merging.schedule import spread

Counts = tuple[int, ...]
"""Merges per layer."""


@dataclass
class Problem:
    """A model and a method, for which a schedule is sought.

    Attributes:
        depth: number of layers.
        patches: number of patches of one image.
        cap: limits a schedule to what is possible.
        cost: share of the unmerged model's FLOPs that a schedule leaves.
        loss: distance from the unmerged model's outputs under a schedule, on the search images.
        target: share of the FLOPs around which the schedule matters.
        floor: share of the FLOPs below which it no longer does.
        until: moment (``time.monotonic``) at which to stop.
        seed: seed of random choices.
        evaluations: calls of ``loss`` so far.
    """

    depth: int
    patches: int
    cap: Callable[[Sequence[int]], Counts]
    cost: Callable[[Sequence[int]], float]
    loss: Callable[[Counts], float]
    target: float
    until: float
    floor: float = 0.0
    seed: int = 0
    evaluations: int = 0
    _known: dict[Counts, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until

    def evaluate(self, counts: Sequence[int]) -> tuple[Counts, float]:
        """Return a schedule as it is possible, with its loss."""
        capped = self.cap(counts)
        if capped not in self._known:
            self.evaluations += 1
            self._known[capped] = self.loss(capped)
        return capped, self._known[capped]

    def scaled(self, shares: Sequence[float], cost: float) -> Counts:
        """Return the smallest schedule of these shares per layer whose cost is at most this share of the FLOPs."""
        low, high = 0, self.patches
        while high - low > 1:
            middle = (low + high) // 2
            if self.cost(self.cap(spread(middle, shares))) <= cost:
                high = middle
            else:
                low = middle
        return self.cap(spread(high, shares))

    def path(self, shares: Sequence[float], points: int = 24) -> list[Counts]:
        """Return schedules of these shares, from nothing to the most that can merge."""
        totals = sorted({round(self.patches * point / points) for point in range(points + 1)})
        return list(dict.fromkeys(self.cap(spread(total, shares)) for total in totals))

    def random(self) -> random.Random:
        """Return a source of random numbers."""
        return random.Random(self.seed)


Search = Callable[[Problem], Iterator[list[Counts]]]
"""A search yields paths (schedules with more and more merging), each better than the one before; the last is used."""
