"""Policy-gradient search: a Gaussian over the layers' shares learns which layers to merge in (REINFORCE)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitrail.tuning.search.base import Counts, Problem

ROUNDS = 40
PAIRS = 3
SPREAD = 0.7
RATE = 0.5


def policy_gradient(problem: Problem) -> Iterator[list[Counts]]:
    """Search the shares of the layers at the target cost by antithetic samples of their logarithms.

    The advantage of a sample is the difference to its mirror image, scaled by the size of such differences so far.
    """
    source = problem.random()
    mean = [0.0] * problem.depth
    best, best_loss, scale = None, math.inf, 0.0

    def loss(logs: list[float]) -> float:
        nonlocal best, best_loss
        peak = max(logs)
        weights = [math.exp(value - peak) for value in logs]
        shares = tuple(weight / sum(weights) for weight in weights)
        found = problem.evaluate(problem.scaled(shares, problem.target))[1]
        if found < best_loss:
            best, best_loss = shares, found
        return found

    loss(mean)
    for _ in range(ROUNDS):
        before, gradient = best, [0.0] * problem.depth
        for _ in range(PAIRS):
            if problem.over:
                break
            noise = [source.gauss(0, SPREAD) for _ in mean]
            advantage = loss([m - n for m, n in zip(mean, noise, strict=True)]) - loss(
                [m + n for m, n in zip(mean, noise, strict=True)]
            )
            scale = 0.9 * scale + 0.1 * abs(advantage) if scale else abs(advantage)
            weight = advantage / (scale or 1.0) / PAIRS
            gradient = [g + weight * n / SPREAD for g, n in zip(gradient, noise, strict=True)]
        mean = [m + RATE * SPREAD * g for m, g in zip(mean, gradient, strict=True)]
        if best is not None and best != before:
            yield problem.path(best)
        if problem.over:
            return
    if best is not None:
        yield problem.path(best)
