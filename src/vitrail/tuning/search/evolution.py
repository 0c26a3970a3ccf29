"""Evolutionary search: schedules of equal cost compete, and the best have children that move merges between layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitrail.merging.schedule import ramp
from vitrail.tuning.search.base import Counts, Problem

POPULATION = 8
PARENTS = 3
GENERATIONS = 40


def evolve(problem: Problem) -> Iterator[list[Counts]]:
    """Search the shares of the layers at the target cost, beginning with ToMe's ramps."""
    source = problem.random()
    reference = 1000
    seeds = [ramp(reference, inflection, problem.depth) for inflection in (0.0, -1.0, 1.0, -0.5, 0.5)]
    alive: list[tuple[float, tuple[float, ...]]] = []
    best: tuple[float, ...] | None = None
    shapes: list[Sequence[float]] = list(seeds)
    for _ in range(GENERATIONS):
        for shape in shapes:
            if problem.over:
                break
            shares = normalized(shape)
            alive.append((problem.evaluate(problem.scaled(shares, problem.target))[1], shares))
        if not alive:
            return
        alive = sorted(set(alive))[:PARENTS]
        if alive[0][1] != best:
            best = alive[0][1]
            yield problem.path(best)
        if problem.over:
            return
        shapes = []
        for _ in range(POPULATION):
            shape = list(source.choice(alive)[1])
            for _ in range(source.randint(1, 2)):
                giver, taker = source.randrange(problem.depth), source.randrange(problem.depth)
                moved = shape[giver] * source.choice((0.5, 1.0))
                shape[giver] -= moved
                shape[taker] += moved
            shapes.append(shape)


def normalized(shape: Sequence[float]) -> tuple[float, ...]:
    """Return shares that sum to one."""
    total = sum(shape)
    return tuple(share / total for share in shape)
