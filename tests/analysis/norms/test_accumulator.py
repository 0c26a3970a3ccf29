"""Norms over layers: planted layers, streams that equal one pass, and non-finite norms."""

import itertools
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.analysis.norms import NormAccumulator, analyze_norms, find_threshold
from vitrail.analysis.norms.accumulator import MOST_NAMED, exact_sum
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import Role, TokenLayout

LAYOUT = TokenLayout.of(Role.CLASS, grid=(1, 12, 10))


def planted(layers=6, images=20, onset=3, ratio=6.0, seed=0):
    """Norms whose layers from ``onset`` on have the tokens 7 and 50 of each image at a multiple of their norm."""
    norms = 40 * torch.exp(0.12 * torch.randn(layers, images, 120, generator=torch.Generator().manual_seed(seed)))
    norms[onset:, :, [7, 50]] *= ratio
    return norms


def test_onset_share_places_and_maps_of_planted_artifacts():
    norms = planted()
    result = analyze_norms(norms, LAYOUT)
    assert result.verdict == "artifacts"
    assert result.onset == 3
    assert [layer.verdict for layer in result.per_layer] == ["none"] * 3 + ["artifacts"] * 3
    assert result.outlier_share == 2 / 120
    assert result.outliers.nonzero()[:, 1].unique().tolist() == [7, 50]
    assert result.outliers_per_image == [2] * 20
    assert result.images_with_outliers == 20
    with pytest.warns(DeprecationWarning, match="images_with_outliers"):
        assert result.pictures_with_outliers == 20
    assert torch.equal(result.maps, norms[-1].reshape(20, 1, 12, 10))
    assert result.threshold == pytest.approx(find_threshold(norms[-1]).threshold, rel=0.1)  # both are in the gap
    assert result.ratio == pytest.approx(6, rel=0.1)


def test_artifacts_that_disappear_have_no_onset():
    norms = planted()
    norms[4:] = planted(layers=2, onset=2)
    result = analyze_norms(norms, LAYOUT)
    assert (result.onset, result.verdict, result.threshold) == (None, "none", None)
    assert not result.outliers.any()
    assert result.per_layer[3].verdict == "artifacts"
    assert result.per_layer[3].share_above_last is None


def test_onset_begins_after_the_last_layer_without_artifacts():
    norms = planted(onset=0)
    norms[2] = planted(onset=6)[2]
    assert analyze_norms(norms, LAYOUT).onset == 3
    assert analyze_norms(planted(onset=0), LAYOUT, layers=[3, 5, 7, 9, 10, 11]).onset == 3


def test_summary_statistics_are_those_of_the_norms():
    norms = planted()
    result = analyze_norms(norms, LAYOUT)
    for layer, values in zip(result.per_layer, norms.double(), strict=True):
        assert layer.mean == pytest.approx(values.mean().item(), rel=1e-12)
        assert layer.std == pytest.approx(values.std(correction=0).item(), rel=1e-9)
        assert layer.quantiles["max"] == values.max().item()
        for q in (1, 5, 25, 50, 75, 95, 99):
            assert layer.quantiles[str(q)] == pytest.approx(values.quantile(q / 100).item(), rel=0.02)
        assert layer.share_above_last == (values > result.threshold).double().mean().item()
    assert sum(result.histogram.counts) == norms[-1].numel()
    assert len(result.histogram.edges) == len(result.histogram.counts) + 1 <= 101
    assert result.histogram.edges[0] <= norms[-1].min() <= norms[-1].max() <= result.histogram.edges[-1]


def test_dictionary_is_json_with_the_promised_keys_and_no_maps():
    data = analyze_norms(planted(), LAYOUT).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {"threshold", "outlier_share", "verdict", "confidence", "onset", "histogram", "per_layer"} <= set(data)
    assert {"layer", "quantiles", "mean", "std", "threshold", "verdict", "outlier_share", "share_above_last"} <= set(
        data["per_layer"][0]
    )
    assert not {"maps", "outliers"} & set(data)


def test_whole_images_above_the_others_are_no_artifacts():
    norms = planted(onset=6)
    norms[:, 4] *= 4
    result = analyze_norms(norms, LAYOUT)
    assert find_threshold(norms[-1]).verdict == "artifacts"
    assert result.verdict == "content"
    assert "whole images" in result.reason


def test_high_norms_that_entered_the_model_are_content():
    norms = planted(onset=0)
    result = analyze_norms(norms, LAYOUT, entry=norms[0])
    assert analyze_norms(norms, LAYOUT).verdict == "artifacts"
    assert (result.verdict, result.onset, result.outlier_share) == ("content", None, 2 / 120)
    assert all(layer.verdict == "content" for layer in result.per_layer)
    assert result.confidence > 0.5
    assert "content explains it" in result.reason


def test_artifacts_on_bright_patches_are_told_from_the_bright_patches():
    """Bright patches enter with a high norm and keep it; artifacts, on other patches, grow to the same norm."""
    entry = planted(layers=1, onset=1)[0]
    entry[:, [20, 80]] *= 4
    norms = entry * torch.exp(0.05 * torch.randn(6, 20, 120, generator=torch.Generator().manual_seed(3)))
    norms[3:, :, [7, 50]] *= 6
    result = analyze_norms(norms, LAYOUT, entry=entry)
    assert (result.verdict, result.onset) == ("artifacts", 3)
    assert [layer.verdict for layer in result.per_layer[:3]] == ["content"] * 3


@pytest.mark.parametrize("spread", [0.4, 0.8])
def test_objects_whose_tokens_move_together_are_content(spread):
    """A rectangle of 9 to 49 patches in each image, at 1.6 times the norm and more or less so from image to image."""
    alarms = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        maps = np.exp(0.1 * rng.standard_normal((40, 14, 14)))
        for image in maps:
            height, width = rng.integers(3, 8, 2)
            top, left = rng.integers(0, 15 - height), rng.integers(0, 15 - width)
            image[top : top + height, left : left + width] *= 1.6 * np.exp(spread * rng.standard_normal())
        norms = torch.from_numpy(maps).float().reshape(1, 40, 196)
        verdict = analyze_norms(norms, TokenLayout.of(Role.CLASS, grid=(1, 14, 14))).verdict
        alarms += verdict not in ("none", "content")
    assert alarms <= 1


def test_artifacts_of_two_images_are_too_few_for_a_verdict():
    norms = planted(onset=6)
    norms[:, :2, 10:30:4] *= 8
    result = analyze_norms(norms, LAYOUT)
    assert (result.verdict, result.confidence) == ("uncertain", 0)
    assert "2 of the images" in result.reason


def test_non_finite_norms_are_counted_and_listed():
    norms = planted()
    clean = analyze_norms(norms, LAYOUT)
    norms[1, 3, :5] = math.nan
    norms[5, 17, 0] = math.inf
    norms[:, 9] = math.nan
    result = analyze_norms(norms, LAYOUT, images=range(100, 120))
    named = [(place.image, place.layer, place.tokens) for place in result.not_finite]
    assert named == [(103, 1, 5), *((109, layer, 120) for layer in range(6)), (117, 5, 1)]
    assert result.num_not_finite == 5 + 6 * 120 + 1
    assert [layer.num_not_finite for layer in result.per_layer] == [120, 125, 120, 120, 120, 121]
    assert (result.verdict, result.onset) == ("artifacts", 3)
    assert result.per_layer[0].mean == pytest.approx(clean.per_layer[0].mean, rel=0.01)
    assert result.outliers_per_image[9] == 0
    assert not result.outliers[17, 0]


def test_all_norms_non_finite():
    result = analyze_norms(torch.full((2, 3, 120), math.nan), LAYOUT)
    assert (result.verdict, result.num_not_finite) == ("uncertain", 720)
    assert result.to_dict()["per_layer"][0]["mean"] is None


def test_listed_places_are_bounded_in_any_order():
    norms = torch.full((2, 150, 4), math.nan)
    forwards, backwards = NormAccumulator(2).add(norms), NormAccumulator(2)
    for image in reversed(range(150)):
        backwards.add(norms[:, [image]], images=[image])
    assert len(forwards.result().not_finite) == MOST_NAMED
    assert forwards.result().to_dict() == backwards.result().to_dict()


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 20), max_size=5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 1000),
    onset=st.integers(0, 3),
)
def test_any_split_over_ranks_equals_one_pass_exactly(cuts, order, seed, onset):
    norms = planted(layers=3, onset=onset, seed=seed)
    norms[1, seed % 20, 3] = math.nan
    entry = planted(layers=1, onset=1, seed=seed + 1)[0]
    whole = NormAccumulator(3).add(norms, entry=entry, grid=LAYOUT.grid).result().to_dict()
    edges = sorted({0, 20, *cuts})
    parts = list(itertools.pairwise(edges))
    order.shuffle(parts)
    merged = NormAccumulator(3)
    for first, last in parts:
        part = NormAccumulator(3)
        for image in range(first, last):
            one = slice(image, image + 1)
            part.add(norms[:, one], images=[image], entry=entry[one], grid=LAYOUT.grid)
        merged.merge(pickle.loads(pickle.dumps(part)))
    assert merged.result().to_dict() == whole
    assert {**analyze_norms(norms, LAYOUT, entry=entry).to_dict(), "outliers_per_image": None} == whole


def test_merging_leaves_the_other_one_alone():
    one, other = NormAccumulator(6).add(planted()), NormAccumulator(6).add(planted(seed=1))
    before = other.result().to_dict()
    one.merge(other)
    assert one.num_images == 40
    assert other.result().to_dict() == before


def test_grids_may_differ_from_batch_to_batch():
    stream = NormAccumulator(6).add(planted()).add(planted()[:, :5, :77])
    assert stream.result().num_tokens == 20 * 120 + 5 * 77


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e150, allow_subnormal=False), max_size=50), st.randoms(use_true_random=False))
def test_sums_are_exact(values, order):
    assert exact_sum(np.array(values)) == sum(map(Fraction, values), Fraction(0))
    order.shuffle(values)
    assert float(exact_sum(np.array(values))) == math.fsum(values)


def test_errors_leave_the_accumulator_unchanged():
    stream = NormAccumulator(6)
    with pytest.raises(UnsupportedInput, match="no image was added"):
        stream.result()
    stream.add(planted())
    before = stream.result().to_dict()
    broken = planted()
    broken[5, 0, 0] = -1
    for norms in (broken, planted(layers=5), planted()[0]):
        with pytest.raises(UnsupportedInput):
            stream.add(norms)
    with pytest.raises(UnsupportedInput, match="1 indices for 20 images"):
        stream.add(planted(), images=[1])
    assert stream.result().to_dict() == before
    with pytest.raises(UnsupportedInput, match="class and register"):
        analyze_norms(torch.ones(2, 3, 121), LAYOUT)
    with pytest.raises(InvalidOption, match="false_alarm"):
        NormAccumulator(2, false_alarm=1.0)
    with pytest.raises(InvalidOption, match="layers"):
        NormAccumulator([1, 1])
    with pytest.raises(InvalidOption, match="same layers"):
        stream.merge(NormAccumulator(5))
