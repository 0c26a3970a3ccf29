"""The artifact token detector: power, false alarms, and invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.extras import always
from vitrail.analysis.norms import _valley_test as valleys
from vitrail.analysis.norms import find_threshold, threshold
from vitrail.analysis.norms._histogram import EDGES, NUM_BINS, bins_of, count_norms, quantile
from vitrail.errors import InvalidOption, UnsupportedInput

NUM_TOKENS = 50 * 196

BULKS = {
    "lognormal": lambda rng, n: np.exp(0.15 * rng.standard_normal(n)),
    "gamma": lambda rng, n: rng.gamma(40, size=n) / 40,
    "skewed to the left": lambda rng, n: rng.beta(8, 1.5, n),
    "foreground and background": lambda rng, n: np.exp(0.1 * rng.standard_normal(n)) * rng.choice([1, 1.6], n),
}

HEAVY = {
    "lognormal 0.5": lambda rng, n: np.exp(0.5 * rng.standard_normal(n)),
    "gamma 2": lambda rng, n: rng.gamma(2, size=n),
    "exponential": lambda rng, n: rng.exponential(size=n),
    "Student 3": lambda rng, n: np.sqrt(rng.chisquare(8, n) / (rng.chisquare(3, n) / 3)),
    "one plus Cauchy": lambda rng, n: 1 + np.abs(rng.standard_cauchy(n)),
    "Pareto 1.5": lambda rng, n: 1 + rng.pareto(1.5, n),
    "log Student 3": lambda rng, n: np.exp(0.15 * rng.standard_t(3, n)),
    "narrow and wide": lambda rng, n: np.exp(np.where(rng.random(n) < 0.05, 0.6, 0.1) * rng.standard_normal(n)),
    "two bulks 1.6": BULKS["foreground and background"],
    "small bulk 1.6": lambda rng, n: np.exp(0.1 * rng.standard_normal(n)) * np.where(rng.random(n) < 0.05, 1.6, 1),
}


def plant(values, rng, share, ratio):
    """Multiply a share of the norms; return the norms and a mask of these."""
    chosen = np.zeros(len(values), bool)
    chosen[rng.permutation(len(values))[: round(share * len(values))]] = True
    return np.where(chosen, ratio * values, values), chosen


def tensor(values):
    return torch.from_numpy(np.ascontiguousarray(values))


@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize(
    ("share", "ratio", "rate"),
    [
        *((0.005, 3, 0.0), (0.005, 5, 0.95), (0.005, 10, 0.95)),
        *((0.02, 3, 0.95), (0.02, 5, 0.95), (0.02, 10, 0.95)),
        *((0.05, 3, 0.95), (0.05, 5, 0.95), (0.05, 10, 0.95)),
    ],
)
def test_planted_artifacts_are_found_at_the_stated_rate_with_the_right_share(bulk, share, ratio, rate):
    if (share, ratio) == (0.005, 3) and bulk != "foreground and background":
        rate = 0.5  # Fifty tokens, hardly apart; three times the background is too near to the foreground's tail.
    hits = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        norms, chosen = plant(BULKS[bulk](rng, NUM_TOKENS), rng, share, ratio)
        found = find_threshold(tensor(norms))
        if found.verdict != "artifacts":
            continue
        above = norms > found.threshold
        hits += 1
        assert found.outlier_share == above.mean()
        assert found.method == "valley"
        assert found.confidence >= 0.9
        if ratio >= 5:
            assert found.outlier_share == pytest.approx(share, rel=0.1)
            assert (above == chosen).mean() > 0.999
            assert found.ratio == pytest.approx(ratio, rel=0.25)
    assert hits / 30 >= rate


@pytest.mark.parametrize("family", HEAVY)
@pytest.mark.parametrize("tokens", always([NUM_TOKENS], [588, NUM_TOKENS]))
def test_clean_distributions_are_flagged_in_at_most_two_percent_of_draws(family, tokens, monkeypatch):
    monkeypatch.setattr(
        threshold, "_power", lambda *given: ((1.0,) * 4,) * 4
    )  # it tells "none" from "uncertain", when all is found
    alarms = [
        find_threshold(tensor(HEAVY[family](np.random.default_rng(seed), tokens))).verdict == "artifacts"
        for seed in range(200)
    ]
    assert np.mean(alarms) <= 0.02


@pytest.mark.parametrize("bulk", BULKS)
def test_ordinary_bulks_have_no_artifacts(bulk):
    for seed in range(20):
        found = find_threshold(tensor(BULKS[bulk](np.random.default_rng(seed), NUM_TOKENS)))
        assert (found.verdict, found.threshold, found.outlier_share, found.method) == ("none", None, 0, "none")
        assert found.power["2%"]["5"] > 0.95
        assert math.isnan(found.ratio)


@pytest.mark.parametrize("tokens", always([10, 1000], [10, 100, 1000]))
def test_the_p_value_holds_for_the_hardest_clean_tail(tokens, monkeypatch):
    """A flat tail: no valley, but as near to one as a falling density can be."""
    monkeypatch.setattr(valleys, "MIN_RATIO", 1.0)
    rng = np.random.default_rng(0)
    values = []
    for _ in range(500):
        counts = np.zeros(NUM_BINS, np.int64)
        counts[3000] = 20 * tokens
        np.add.at(counts, 3001 + (rng.random(tokens) * valleys.CELLS * valleys.MIN_CELL).astype(int), 1)
        values.append(valleys.p_value(valleys.Tail.of(counts).scan().best(valleys.MAX_SHARE)))
    for p in (0.1, 0.01):
        assert np.mean(np.array(values) < p) <= p + 3 * math.sqrt(p * (1 - p) / 500)


@pytest.mark.parametrize(("width", "tokens"), [(0.1, 400), (0.15, 800), (0.2, 2000), (0.25, 4000)])
def test_power_is_about_the_rate_at_which_usual_artifacts_are_found(width, tokens):
    powers, hits = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        clean = np.exp(width * rng.standard_normal(tokens))
        found = find_threshold(tensor(clean))
        powers.append(found.power["2%"]["5"])
        hits.append(find_threshold(tensor(plant(clean, rng, 0.02, 5)[0])).verdict == "artifacts")
    assert np.mean(powers) <= np.mean(hits) + 0.1
    assert np.mean(hits) > 0.5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.floats(0.02, 0.5), tokens=st.integers(64, 5000), share=st.floats(0, 0.05))
def test_power_never_falls_with_share_or_multiple_and_is_the_confidence(seed, width, tokens, share):
    rng = np.random.default_rng(seed)
    norms, _ = plant(np.exp(width * rng.standard_normal(tokens)), rng, share, 6)
    found = find_threshold(tensor(norms))
    power = np.array([list(row.values()) for row in found.power.values()])
    assert power.shape == (4, 4)
    assert (np.diff(power, axis=0) >= 0).all()
    assert (np.diff(power, axis=1) >= 0).all()
    if found.verdict == "none":
        assert found.confidence == pytest.approx(power[:, 1:].mean())


def test_a_sample_too_small_for_rare_artifacts_says_that_they_could_not_have_been_seen():
    found = find_threshold(tensor(np.exp(0.1 * np.random.default_rng(0).standard_normal(1000))))
    assert found.verdict == "none"
    assert set(found.power["0.1%"].values()) == {0.0}  # a single token
    assert found.power["2%"]["5"] > 0.95
    assert found.confidence < 0.75


@pytest.mark.parametrize("tokens", [196, 196 * 5])
def test_one_token_far_out_is_never_certainly_none(tokens):
    """However far out the token is: the verdict must not go back to "none" as it moves."""
    for width in (0.1, 0.2, 0.3):
        said = np.zeros(4)
        for seed in range(20):
            clean = np.exp(width * np.random.default_rng(seed).standard_normal(tokens))
            for place, multiple in enumerate((3, 5, 10, 30)):
                norms = clean.copy()
                norms[seed] = multiple * np.median(clean)
                said[place] += find_threshold(tensor(norms)).verdict == "none"
        assert (np.diff(said) <= 0).all(), (width, said)
        assert said[-1] == 0


def test_dinov2_like_norms():
    rng = np.random.default_rng(0)
    norms = np.concatenate([rng.gamma(8, 5, 97_630), rng.normal(350, 80, 2_370).clip(150)])
    found = find_threshold(tensor(norms))
    assert found.verdict == "artifacts"
    assert 100 < found.threshold < 200
    assert found.outlier_share == pytest.approx(0.0237, rel=0.02)


def test_threshold_lies_below_both_of_two_groups_of_artifacts():
    rng = np.random.default_rng(0)
    clean = np.exp(0.1 * rng.standard_normal(10_000))
    clean[:200] *= 3
    clean[200:400] *= 12
    found = find_threshold(tensor(clean))
    assert found.verdict == "artifacts"
    assert found.outlier_share == pytest.approx(0.04, rel=0.01)


def test_a_large_second_mode_is_not_outliers():
    rng = np.random.default_rng(0)
    found = find_threshold(tensor(plant(np.exp(0.1 * rng.standard_normal(5000)), rng, 0.35, 4)[0]))
    assert found.verdict == "uncertain"
    assert "more than 20%" in found.reason


def test_low_norms_are_no_artifacts():
    rng = np.random.default_rng(0)
    assert find_threshold(tensor(plant(np.exp(0.1 * rng.standard_normal(5000)), rng, 0.02, 0.1)[0])).verdict == "none"


def test_few_tokens_are_uncertain_and_say_so():
    found = find_threshold(torch.rand(40) + 1)
    assert (found.verdict, found.confidence, found.threshold) == ("uncertain", 0, None)
    assert "only 40 tokens" in found.reason


def test_two_tokens_far_out_are_too_few_for_a_verdict():
    norms = torch.from_numpy(np.exp(0.1 * np.random.default_rng(0).standard_normal(500)))
    norms[:2] *= 8
    found = find_threshold(norms)
    assert (found.verdict, found.method) == ("uncertain", "robust")
    assert found.outlier_share == 2 / 500
    assert "try more" in found.reason


def test_non_finite_norms_are_counted_and_change_nothing_else():
    norms, _ = plant(BULKS["lognormal"](np.random.default_rng(0), 5000), np.random.default_rng(1), 0.02, 6)
    broken = np.append(norms, [math.nan, math.inf, -math.inf])
    clean, found = find_threshold(tensor(norms)), find_threshold(tensor(broken))
    assert (found.num_tokens, found.num_not_finite) == (5003, 3)
    assert found.threshold == clean.threshold
    assert found.outlier_share == clean.outlier_share
    nothing = find_threshold(torch.full((100,), math.nan))
    assert (nothing.verdict, nothing.num_not_finite) == ("uncertain", 100)
    assert nothing.to_dict()["typical"] is None


@pytest.mark.parametrize("norms", [torch.zeros(100), torch.ones(1000), torch.full((100,), 1e30), torch.tensor([])])
def test_degenerate_norms_have_no_artifacts(norms):
    assert find_threshold(norms).verdict != "artifacts"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision_of_norms_does_not_matter(dtype):
    norms, _ = plant(50 * BULKS["lognormal"](np.random.default_rng(0), 20_000), np.random.default_rng(1), 0.02, 6)
    found = find_threshold(tensor(norms).to(dtype).reshape(100, 200))
    assert (found.verdict, found.outlier_share) == ("artifacts", 0.02)
    clean = tensor(50 * BULKS["lognormal"](np.random.default_rng(0), 1_000_000)).to(dtype)
    assert find_threshold(clean).verdict == "none"


def test_errors():
    with pytest.raises(UnsupportedInput, match="0 or more"):
        find_threshold(-torch.rand(100))
    with pytest.raises(UnsupportedInput, match="real numbers"):
        find_threshold(torch.zeros(100, dtype=torch.complex64))
    with pytest.raises(InvalidOption, match="false_alarm"):
        find_threshold(torch.rand(100), false_alarm=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e5), ratio=st.sampled_from([1, 5, 10]))
def test_scaling_all_norms_scales_the_threshold(seed, scale, ratio):
    rng = np.random.default_rng(seed)
    norms, _ = plant(np.exp(0.12 * rng.standard_normal(4000)), rng, 0.03, ratio)
    one, other = find_threshold(tensor(norms)), find_threshold(tensor(scale * norms))
    assert one.verdict == other.verdict == ("none" if ratio == 1 else "artifacts")
    assert other.typical == pytest.approx(scale * one.typical, rel=0.01)
    if one.threshold is not None:
        # The middle of a gap may move by a cell or so where norms sit on the edge of another bin.
        assert other.threshold == pytest.approx(scale * one.threshold, rel=0.1)
        assert other.outlier_share == pytest.approx(one.outlier_share, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.integers(-1000, 1000))
def test_scaling_by_whole_bins_changes_nothing_but_the_scale(seed, shift):
    rng = np.random.default_rng(seed)
    counts, _ = count_norms(tensor(plant(np.exp(0.12 * rng.standard_normal(3000)), rng, 0.03, 6)[0]))
    one, other = (valleys.Tail.of(c) for c in (counts, np.roll(counts, shift)))
    assert np.array_equal(one.scan().statistic, other.scan().statistic)
    assert np.array_equal(one.at + shift, other.at)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 3000))
def test_order_and_shape_do_not_matter(seed, tokens):
    rng = np.random.default_rng(seed)
    norms = rng.gamma(3, size=2 * tokens)
    shuffled = rng.permutation(norms).reshape(2, tokens)
    assert find_threshold(tensor(norms)).to_dict() == find_threshold(tensor(shuffled)).to_dict()


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(0, 2.0**40, width=32), min_size=1, max_size=200),
    index=st.integers(1, NUM_BINS - 1),
)
def test_counts_above_an_edge_are_what_a_comparison_counts(values, index):
    edge = float(EDGES[index])
    norms = torch.tensor([*values, edge, np.nextafter(np.float32(edge), np.float32(math.inf)).item()])
    assert int(count_norms(norms)[0][index:].sum()) == int((norms > edge).sum())
    assert bins_of(norms)[-2:].tolist() == [index - 1, index]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=300), q=st.floats(0, 1))
def test_quantiles_are_right_to_a_bin(values, q):
    result = quantile(count_norms(torch.tensor(values, dtype=torch.float64))[0], q)
    exact = np.quantile(values, [max(0, q - 1 / len(values)), min(1, q + 1 / len(values))])
    assert exact[0] * 0.99 <= result <= exact[1] * 1.01


def test_a_million_tokens_take_little_time_and_no_sample():
    norms = torch.from_numpy(BULKS["gamma"](np.random.default_rng(0), 2_000_000)).float()
    norms[::1000] *= 6
    found = find_threshold(norms)
    assert found.verdict == "artifacts"
    assert found.outlier_share == pytest.approx(0.001, rel=0.02)
