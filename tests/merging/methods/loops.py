"""Plain loops that merging methods are compared with, and contexts to run them in."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from vitrail.merging import Context, Reduction


def context(x: Tensor, layer: int = 0, grid: tuple[int, int, int] | None = None, **options: Any) -> Context:
    """Return the context of a block with the same values as tokens, queries, keys and values of one head."""
    heads = x.unsqueeze(1)
    return Context(layer, grid or (1, 1, x.shape[1]), x, project=lambda: (heads, heads, heads), **options)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / max(float(a.norm() * b.norm()), 1e-300))


def groups_of(target: Tensor, present: Tensor | None = None) -> set[frozenset[int]]:
    """Return the groups of one image (N,) as sets of positions, without padding."""
    found: dict[int, set[int]] = {}
    for position, group in enumerate(target.tolist()):
        if present is None or present[position]:
            found.setdefault(group, set()).add(position)
    return {frozenset(members) for members in found.values()}


def groups_after(reduction: Reduction | None, image: int, present: Tensor | None = None) -> set[frozenset[int]]:
    assert reduction is not None
    return groups_of(reduction.assignment.target[image], None if present is None else present[image])


def best_pairs(scores: dict[tuple[int, int], float]) -> list[tuple[float, int, int]]:
    """Return each source's best pair (score, source, destination), best first; ties go to the lower index."""
    best: dict[int, tuple[float, int]] = {}
    for (source, destination), score in sorted(scores.items()):
        if source not in best or score > best[source][0]:
            best[source] = score, destination
    return sorted(
        ((score, source, destination) for source, (score, destination) in best.items()), key=lambda p: (-p[0], p[1])
    )


def merge_pairs(tokens: list[int], pairs: list[tuple[float, int, int]]) -> set[frozenset[int]]:
    """Return the groups of these positions after the pairs merged."""
    into = {source: destination for _, source, destination in pairs}
    groups: dict[int, set[int]] = {}
    for token in tokens:
        groups.setdefault(into.get(token, token), set()).add(token)
    return {frozenset(members) for members in groups.values()}


def bipartite(free: list[int]) -> list[tuple[int, int]]:
    """Return all pairs of a free even position and a free odd one."""
    return [(a, b) for a in free if a % 2 == 0 for b in free if b % 2 == 1]


def entropy(values: list[float]) -> float:
    return -sum(p * math.log(p) for p in values if p > 0)


def assert_in_place(reduction: Reduction | None, present: Tensor | None = None) -> None:
    """Check that groups are filled from the front, without gaps."""
    assert reduction is not None
    for image, target in enumerate(reduction.assignment.target):
        kept = target if present is None else target[present[image]]
        assert sorted(set(kept.tolist())) == list(range(len(set(kept.tolist()))))
        assert reduction.assignment.length >= len(set(kept.tolist()))
