"""Intervals against scipy, against sums written out, and against simulations whose truth is known."""

import math

import numpy as np
import pytest

from experiments.common.statistics import paired_difference, spread

stats = pytest.importorskip("scipy.stats", reason="intervals need scipy")


def test_spread_is_that_of_a_sample() -> None:
    assert spread([1.0, 2.0, 6.0]).mean == 3
    assert spread([1.0, 2.0, 6.0]).sd == pytest.approx(math.sqrt(7))
    assert math.isnan(spread([4.0]).sd)


def test_the_interval_over_seeds_is_the_paired_t_interval() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.random((2, 4, 50)) < [[[0.8]], [[0.7]]]
    found = paired_difference(first, second)
    expected = stats.ttest_rel(first.mean(1), second.mean(1)).confidence_interval()
    assert (found.seeds_low, found.seeds_high) == pytest.approx(tuple(expected))
    assert found.seeds == pytest.approx(tuple(first.mean(1) - second.mean(1)))
    assert found.mean == pytest.approx(first.mean() - second.mean())


def test_one_seed_gives_the_paired_t_interval_over_pictures() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.random((2, 1, 200)) < 0.7
    found = paired_difference(first, second)
    expected = stats.ttest_rel(first[0].astype(float), second[0].astype(float)).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert math.isinf(found.seeds_high)


def test_the_interval_against_sums_written_out() -> None:
    """The variance components of a two-way table, one loop for each, in a case where no bound takes part."""
    draw = np.random.default_rng(2)
    seeds, pictures = 4, 30
    d = draw.normal(0, 0.1, (seeds, 1)) + draw.normal(0, 1, (1, pictures)) + draw.normal(0, 0.5, (seeds, pictures))
    mean = d.mean()
    by_seed = [d[s].mean() for s in range(seeds)]
    by_picture = [d[:, i].mean() for i in range(pictures)]
    of_seeds = pictures * sum((x - mean) ** 2 for x in by_seed) / (seeds - 1)
    of_pictures = seeds * sum((x - mean) ** 2 for x in by_picture) / (pictures - 1)
    rest = 0.0
    for s in range(seeds):
        for i in range(pictures):
            rest += (d[s, i] - by_seed[s] - by_picture[i] + mean) ** 2 / ((seeds - 1) * (pictures - 1))
    assert min(of_seeds, of_pictures) > rest
    # σ²s/S + σ²p/N + σ²r/(S·N), each component estimated by itself
    variance = (of_seeds - rest) / pictures / seeds + (of_pictures - rest) / seeds / pictures + rest / seeds / pictures
    found = paired_difference(d, np.zeros_like(d))
    half = stats.t.ppf(0.975, found.degrees) * math.sqrt(variance)
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
    assert found.seeds_high < found.high
    assert seeds - 1 <= found.degrees <= (seeds - 1) + (pictures - 1) + (seeds - 1) * (pictures - 1)


@pytest.mark.parametrize("of_seeds", [0.0, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("of_pictures", [0.0, 0.3])
def test_the_truth_is_inside_as_often_as_promised(of_seeds: float, of_pictures: float) -> None:
    draw, times, truth, inside = np.random.default_rng(3), 800, 0.3, 0
    for _ in range(times):
        d = truth + draw.normal(0, of_seeds, (3, 1)) + draw.normal(0, of_pictures, (1, 200))
        d = d + draw.normal(0, 0.3, (3, 200))
        found = paired_difference(d, np.zeros_like(d))
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / times <= 0.99  # 0.95 promised; a simulation of 800 errs by 0.008


def test_an_interval_over_seeds_alone_forgets_the_pictures() -> None:
    """Why there are two: where pictures differ and seeds do not, the plain interval is too short."""
    draw, inside = np.random.default_rng(4), 0
    for _ in range(300):
        d = draw.normal(0, 0.5, (1, 300)) + draw.normal(0, 0.2, (3, 300))
        found = paired_difference(d, np.zeros_like(d))
        inside += found.seeds_low <= 0 <= found.seeds_high
    assert inside / 300 < 0.8


def test_seeds_that_contradict_each_other_leave_an_interval_of_sensible_width() -> None:
    """What one seed gains the other loses: means of seeds and of pictures hardly vary, and yet nothing is certain."""
    draw = np.random.default_rng(6)
    for change in (0, 1):
        right = draw.random(400) < 0.5
        first, second = (np.stack(pair) for pair in zip(*[(right, draw.permutation(right))] * 2, strict=True))
        first[1], second[1] = second[0], first[0]
        first[0, :change] = ~first[0, :change]
        d = first.astype(float) - second
        found = paired_difference(first, second)
        # One of two seeds is free, so that all of the variance counts twice.
        expected = stats.t.ppf(0.975, found.degrees) * d.std() * math.sqrt(2 / d.size)
        assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.02)
        assert found.degrees > 100


def test_no_difference_is_no_interval() -> None:
    same = np.random.default_rng(5).random((3, 40)) < 0.5
    found = paired_difference(same, same)
    assert (found.mean, found.low, found.high, found.clear) == (0, 0, 0, False)
    with pytest.raises(ValueError, match="one shape"):
        paired_difference(same, same[:, :1])
