"""Greedy search by sensitivity: merge where the outputs move least for each FLOP saved."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vitrail.tuning.search.base import Counts, Problem

STEPS = 24
"""Steps from no merging to all patches merged; each adds this share of the patches to one layer."""


def by_sensitivity(problem: Problem) -> Iterator[list[Counts]]:
    """Add merges to one layer at a time, the layer with the smallest loss per FLOP saved.

    Gains are re-evaluated lazily: only the layer that looks best is measured again before it is chosen, since adding
    merges elsewhere seldom makes a layer better.
    """
    step = max(1, round(problem.patches / STEPS))
    counts, loss = problem.evaluate((0,) * problem.depth)
    path, cost = [counts], problem.cost(counts)

    def tried(layer: int) -> tuple[float, Counts, float]:
        more = tuple(r + step * (index == layer) for index, r in enumerate(counts))
        capped, found = problem.evaluate(more)
        saved = cost - problem.cost(capped)
        return ((found - loss) / saved if saved > 0 else float("inf")), capped, found

    heap = [(tried(layer)[0], layer, 0) for layer in range(problem.depth) if not problem.over]
    heapq.heapify(heap)
    for turn in range(1, STEPS * problem.depth):
        while heap and heap[0][2] != turn and not problem.over:
            _, layer, _ = heapq.heappop(heap)
            heapq.heappush(heap, (tried(layer)[0], layer, turn))
        if not heap or problem.over or heap[0][0] == float("inf"):
            return
        layer = heapq.heappop(heap)[1]
        price, counts, loss = tried(layer)
        cost = problem.cost(counts)
        path.append(counts)
        yield list(path)
        if cost <= problem.floor:
            return
        heapq.heappush(heap, (price, layer, turn))
