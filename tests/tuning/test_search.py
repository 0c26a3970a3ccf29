"""Searches on a problem whose best schedule is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from vitrail.tuning import SEARCHES
from vitrail.tuning.search import Problem

PRICES = (8.0, 4.0, 1.0, 0.1, 0.1, 2.0)
"""What it costs in each layer to merge a token; merges in early layers save more."""
PATCHES = 60


def cost(counts: Sequence[int]) -> float:
    """Share of the tokens that all layers together still process."""
    length, total = PATCHES, 0
    for r in counts:
        length -= r
        total += length
    return total / (PATCHES * len(counts))


def cap(counts: Sequence[int]) -> tuple[int, ...]:
    length, found = PATCHES, []
    for r in counts:
        found.append(min(r, length // 2))
        length -= found[-1]
    return tuple(found)


def loss(counts: Sequence[int]) -> float:
    return sum(price * r**2 for price, r in zip(PRICES, counts, strict=True))


def problem(**options: Any) -> Problem:
    return Problem(
        **{
            "depth": len(PRICES),
            "patches": PATCHES,
            "cap": cap,
            "cost": cost,
            "loss": loss,
            "target": 0.7,
            "until": time.monotonic() + 60,
            **options,
        }
    )


def loss_at(path: Sequence[tuple[int, ...]], target: float) -> float:
    return min(loss(counts) for counts in path if cost(counts) <= target)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_beats_equal_merging_and_repeats_itself(name: str) -> None:
    constant = loss_at(problem().path([1.0] * len(PRICES), points=PATCHES), 0.7)
    paths = list(SEARCHES[name](problem()))
    assert loss_at(paths[-1], 0.7) < 0.75 * constant
    assert paths[-1] == list(SEARCHES[name](problem()))[-1]
    costs = [cost(counts) for counts in paths[-1]]
    assert costs == sorted(costs, reverse=True)
    assert all(counts == cap(counts) for counts in paths[-1])


def test_greedy_is_near_the_best_of_all_schedules() -> None:
    """Brute force over a coarse grid of schedules."""
    from itertools import product

    steps = range(0, 31, 6)
    best = min(loss(c) for c in product(steps, repeat=6) if cost(c) <= 0.7 and cap(c) == c)
    assert loss_at(list(SEARCHES["greedy"](problem()))[-1], 0.7) <= 1.15 * best


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_stops_in_time(name: str) -> None:
    late = problem(until=time.monotonic() - 1)
    assert list(SEARCHES[name](late)) in ([], [late.path([1 / 6] * 6)])
    assert late.evaluations <= 1


def test_scaled_is_the_smallest_that_is_cheap_enough() -> None:
    here = problem()
    shares = [1 / 6] * 6
    found = here.scaled(shares, 0.7)
    cheaper = [counts for counts in here.path(shares, points=PATCHES) if cost(counts) <= 0.7]
    assert found == cheaper[0]


def test_a_schedule_is_evaluated_once() -> None:
    here = problem()
    assert here.evaluate([1] * 6) == here.evaluate([1] * 6)
    assert here.evaluations == 1
