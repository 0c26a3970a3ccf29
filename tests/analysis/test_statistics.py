"""Splits and confidence intervals over images."""

import math

import numpy as np
import pytest
import torch

from vitrail.analysis.statistics import Estimate, Split, bootstrap, hold_out, ratio, split_images, subsample, wilson
from vitrail.errors import InvalidOption, UnsupportedInput


class TestSplits:
    def test_parts_are_disjoint_and_complete(self) -> None:
        split = split_images(50, test_share=0.3, seed=4)
        assert sorted(torch.cat([split.train, split.test]).tolist()) == list(range(50))
        assert len(split.test) == 15

    def test_seeds(self) -> None:
        assert torch.equal(split_images(50, seed=1).test, split_images(50, seed=1).test)
        assert not torch.equal(split_images(50, seed=1).test, split_images(50, seed=2).test)

    def test_each_class_is_on_both_sides(self) -> None:
        labels = torch.tensor([0] * 90 + [1] * 7 + [2] * 2 + [9])
        split = split_images(100, labels=labels)
        assert labels[split.test].bincount(minlength=10).tolist()[:3] == [27, 2, 1]
        assert set(labels[split.train].tolist()) == {0, 1, 2, 9}
        assert 9 not in labels[split.test]

    def test_classes_of_one_image_each(self) -> None:
        with pytest.raises(UnsupportedInput, match="two images"):
            split_images(5, labels=torch.arange(5))

    @pytest.mark.parametrize("share", [0, 1, -0.1, math.nan])
    def test_invalid_shares(self, share: float) -> None:
        with pytest.raises(InvalidOption, match="test_share"):
            split_images(10, test_share=share)

    def test_one_image(self) -> None:
        with pytest.raises(InvalidOption, match="2 or more"):
            split_images(1)

    def test_explicit_split(self) -> None:
        assert Split([True, True, False], [False, False, True]).train.tolist() == [0, 1]
        assert Split(np.array([3, 1]), torch.tensor([2])).train.tolist() == [3, 1]
        with pytest.raises(InvalidOption, match="1 image is in the split twice"):
            Split([0, 1], [1, 2])
        with pytest.raises(InvalidOption, match="test must be"):
            Split([0, 1], [])
        with pytest.raises(InvalidOption, match="index 7, but there are 5"):
            Split([0, 1], [7]).check(5)

    def test_held_out_rows_are_whole_images(self) -> None:
        groups = torch.arange(20).repeat_interleave(7)[torch.randperm(140)]
        held = hold_out(groups, seed=3)
        assert held is not None
        assert len(groups[held].unique()) == 4
        assert not set(groups[held].tolist()) & set(groups[~held].tolist())
        assert hold_out(groups % 9) is None

    def test_subsample(self) -> None:
        rows = torch.arange(100)
        assert torch.equal(subsample(rows, 100, 0), rows)
        some = subsample(rows, 10, 0)
        assert torch.equal(some, some.unique())
        assert len(some) == 10


class TestIntervals:
    @pytest.mark.parametrize(
        ("successes", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)]
    )
    def test_wilson(self, successes: int, trials: int, low: float, high: float) -> None:
        assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)

    def test_wilson_of_no_samples(self) -> None:
        assert wilson(0, 0) is None

    def test_bootstrap_agrees_with_theory(self) -> None:
        values = torch.randn(400).double()
        interval = bootstrap(torch.stack([values, torch.ones(400)], 1), ratio(0, 1), resamples=4000)
        assert interval is not None
        half = 1.96 * float(values.std()) / 20
        assert interval == pytest.approx((float(values.mean()) - half, float(values.mean()) + half), abs=0.02)

    def test_tokens_of_one_image_are_one_draw(self) -> None:
        """Ten equal tokens in each image carry as much information as one."""
        one = torch.stack([torch.randn(50), torch.ones(50)], 1)
        assert bootstrap(one, ratio(0, 1)) == pytest.approx(bootstrap(one * 10, ratio(0, 1)))

    def test_bootstrap_covers(self) -> None:
        hits = 0
        for seed in range(200):
            values = torch.rand(60, generator=torch.Generator().manual_seed(seed))
            interval = bootstrap(torch.stack([values, torch.ones(60)], 1), ratio(0, 1), resamples=300, seed=seed)
            assert interval is not None
            hits += interval[0] <= 0.5 <= interval[1]
        assert 178 <= hits <= 198  # 95 % of 200 is 190; a percentile interval of 60 images is a little short

    def test_too_few(self) -> None:
        assert bootstrap(torch.ones(1, 2), ratio(0, 1)) is None
        assert bootstrap(torch.zeros(5, 2), ratio(0, 1)) is None

    def test_estimate(self) -> None:
        assert Estimate.of([0.25, 0.75], (0.1, 0.9)).to_dict() == {
            "mean": 0.5,
            "sd": pytest.approx(0.35355, abs=1e-5),
            "low": 0.1,
            "high": 0.9,
        }
        assert Estimate.of([1.0], None) == Estimate(1.0, None, None, None)
