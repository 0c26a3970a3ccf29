"""Intervals against scipy, against explicit sums, and against simulations."""

import math

import numpy as np
import pytest

from experiments.common.statistics import mean_interval, paired_difference, spread

stats = pytest.importorskip("scipy.stats", reason="intervals need scipy")


def test_spread_is_the_sample_deviation() -> None:
    assert spread([1.0, 2.0, 6.0]).mean == 3
    assert spread([1.0, 2.0, 6.0]).sd == pytest.approx(math.sqrt(7))
    assert math.isnan(spread([4.0]).sd)


def test_interval_of_a_mean_is_the_t_interval() -> None:
    values = [68.2, 69.9, 70.1, 69.0]
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert mean_interval(values) == pytest.approx(tuple(expected))
    assert mean_interval([4.0]) == (4.0, 4.0)


def test_interval_over_seeds_is_the_paired_t_interval() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.random((2, 4, 50)) < [[[0.8]], [[0.7]]]
    found = paired_difference(first, second)
    expected = stats.ttest_rel(first.mean(1), second.mean(1)).confidence_interval()
    assert (found.seeds_low, found.seeds_high) == pytest.approx(tuple(expected))
    assert found.seeds == pytest.approx(tuple(first.mean(1) - second.mean(1)))
    assert found.mean == pytest.approx(first.mean() - second.mean())


def test_one_seed_gives_the_paired_t_interval_over_images() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.random((2, 1, 200)) < 0.7
    found = paired_difference(first, second)
    expected = stats.ttest_rel(first[0].astype(float), second[0].astype(float)).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert math.isinf(found.seeds_high)


def test_interval_against_explicit_sums() -> None:
    """Compute the variance components of a two-way table with loops, where no bound is active."""
    draw = np.random.default_rng(2)
    seeds, images = 4, 30
    d = draw.normal(0, 0.1, (seeds, 1)) + draw.normal(0, 1, (1, images)) + draw.normal(0, 0.5, (seeds, images))
    mean = d.mean()
    by_seed = [d[s].mean() for s in range(seeds)]
    by_image = [d[:, i].mean() for i in range(images)]
    of_seeds = images * sum((x - mean) ** 2 for x in by_seed) / (seeds - 1)
    of_images = seeds * sum((x - mean) ** 2 for x in by_image) / (images - 1)
    rest = 0.0
    for s in range(seeds):
        for i in range(images):
            rest += (d[s, i] - by_seed[s] - by_image[i] + mean) ** 2 / ((seeds - 1) * (images - 1))
    assert min(of_seeds, of_images) > rest
    # σ²s/S + σ²p/N + σ²r/(S·N), each component estimated separately
    variance = (of_seeds - rest) / images / seeds + (of_images - rest) / seeds / images + rest / seeds / images
    found = paired_difference(d, np.zeros_like(d))
    half = stats.t.ppf(0.975, found.degrees) * math.sqrt(variance)
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
    assert found.seeds_high < found.high
    assert seeds - 1 <= found.degrees <= (seeds - 1) + (images - 1) + (seeds - 1) * (images - 1)


@pytest.mark.parametrize("of_seeds", [0.0, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("of_images", [0.0, 0.3])
def test_coverage_by_simulation(of_seeds: float, of_images: float) -> None:
    draw, times, truth, inside = np.random.default_rng(3), 800, 0.3, 0
    for _ in range(times):
        d = truth + draw.normal(0, of_seeds, (3, 1)) + draw.normal(0, of_images, (1, 200))
        d = d + draw.normal(0, 0.3, (3, 200))
        found = paired_difference(d, np.zeros_like(d))
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / times <= 0.99  # 0.95 promised; a simulation of 800 errs by 0.008


def test_interval_over_seeds_alone_is_too_short_if_images_vary() -> None:
    """The t interval over seeds ignores the images."""
    draw, inside = np.random.default_rng(4), 0
    for _ in range(300):
        d = draw.normal(0, 0.5, (1, 300)) + draw.normal(0, 0.2, (3, 300))
        found = paired_difference(d, np.zeros_like(d))
        inside += found.seeds_low <= 0 <= found.seeds_high
    assert inside / 300 < 0.8


def test_opposite_seeds_give_an_interval_of_sensible_width() -> None:
    """If one seed gains what the other loses, the means hardly vary, yet the difference is uncertain."""
    draw = np.random.default_rng(6)
    for change in (0, 1):
        right = draw.random(400) < 0.5
        first, second = (np.stack(pair) for pair in zip(*[(right, draw.permutation(right))] * 2, strict=True))
        first[1], second[1] = second[0], first[0]
        first[0, :change] = ~first[0, :change]
        d = first.astype(float) - second
        found = paired_difference(first, second)
        # One of two seeds is free, so the variance counts twice.
        expected = stats.t.ppf(0.975, found.degrees) * d.std() * math.sqrt(2 / d.size)
        assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.02)
        assert found.degrees > 100


def test_equal_arms_have_an_empty_interval() -> None:
    same = np.random.default_rng(5).random((3, 40)) < 0.5
    found = paired_difference(same, same)
    assert (found.mean, found.low, found.high, found.clear) == (0, 0, 0, False)
    with pytest.raises(ValueError, match="one shape"):
        paired_difference(same, same[:, :1])
