"""Detector of artifact tokens in one layer, and the norm they start at.

Artifacts are a second mode: the density of log norms rises again above the bulk. Everything is computed from a
histogram over fixed bins, so a tensor, a stream of batches and the sum over ranks give the same answer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis.norms._histogram import EDGES, LOG_BIN, NUM_BINS, Counts, count_norms, quantile
from vitrail.analysis.norms._valley_test import MAX_SHARE, MIN_RATIO, MIN_SHARE, Tail, critical_value, p_value
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption

Verdict = Literal["artifacts", "none", "uncertain"]
Method = Literal["valley", "robust", "none"]
FALSE_ALARM = 0.01
MIN_TOKENS = 64
REFERENCE_SHARE, REFERENCE_RATIO = 0.02, 5.0
"""The artifacts that "none" rules out: the share and the norm that are usual in large models."""
ROBUST_WIDTHS = 5.0
EASIER = 10.0
"""Where the bulk's tail does not explain the tokens above it, a p-value this many times larger is enough."""


class Threshold(Result):
    """Verdict on artifact tokens in one layer, and the norm they start at.

    Attributes:
        confidence: probability of being right, by the test's own model. "artifacts": one minus the probability that
            a clean distribution shows such a valley. "none": the probability that the usual artifacts (2 % of the
            tokens at five times the norm) would have been found among these tokens. "uncertain": 0.
        p_value: probability that a clean distribution with one mode shows a valley as clear as the clearest one here.
    """

    threshold: float | None  # tokens with ``norm > threshold`` are outliers; None if there is nothing to separate
    verdict: Verdict  # "artifacts", "none", or "uncertain" if these norms do not allow either answer
    confidence: float
    method: Method  # "valley" between two modes, "robust" limit from median and spread, or "none"
    outlier_share: float  # share of the finite tokens above the threshold; 0 without a threshold
    typical: float  # median norm of the tokens that are not outliers
    ratio: float  # median norm of the outliers over ``typical``; NaN without outliers
    p_value: float
    num_tokens: int  # all tokens, including those with a non-finite norm
    num_not_finite: int  # tokens with a non-finite norm; nothing else counts them
    reason: str  # the verdict in words


@fitting
def find_threshold(norms: Tensor, *, false_alarm: float = FALSE_ALARM) -> Threshold:
    """Find artifact tokens among the norms of one layer, of any shape.

    Args:
        norms: norms of patch tokens before the final norm layer, without class and register tokens.
        false_alarm: how often a clean distribution may get the verdict "artifacts".

    Example:
        >>> import torch
        >>> norms = torch.cat([torch.linspace(30, 60, 5000), torch.linspace(300, 400, 100)])
        >>> found = find_threshold(norms)
        >>> found.verdict, round(found.outlier_share, 3), 60 < found.threshold < 300
        ('artifacts', 0.02, True)
    """
    check_false_alarm(false_alarm)
    return threshold_from_counts(*count_norms(norms), false_alarm=false_alarm)


def check_false_alarm(value: float) -> None:
    """Raise unless the p-value is calibrated at this level."""
    if not 0 < value <= 0.2:
        raise InvalidOption(f"false_alarm must be a probability above 0 and at most 0.2, such as 0.01; got {value!r}")


def threshold_from_counts(counts: Counts, num_not_finite: int, *, false_alarm: float) -> Threshold:
    """Find the threshold from counts over the fixed bins."""
    total = int(counts.sum())

    def describe(
        at: int | None,
        p: float,
        reason: str,
        method: Method = "none",
        verdict: Verdict = "uncertain",
        confidence: float = 0.0,
    ) -> Threshold:
        """Describe the tokens below and above the edge ``at``."""
        edge = NUM_BINS if at is None else at
        below, above = counts.copy(), counts.copy()
        below[edge:], above[:edge] = 0, 0
        typical, share = quantile(below, 0.5), int(above.sum()) / total if total else 0.0
        threshold, ratio = None if at is None else float(EDGES[at]), quantile(above, 0.5) / typical
        tokens = total + num_not_finite, num_not_finite
        return Threshold(threshold, verdict, confidence, method, share, typical, ratio, p, *tokens, reason)

    if total < MIN_TOKENS:
        return describe(
            None, 1.0, f"only {total} tokens have a finite norm; at least {MIN_TOKENS} are needed; use more images"
        )
    tail = Tail.of(counts)
    valleys, shoulder = tail.scan(), tail.has_shoulder(false_alarm)
    p = p_value(valleys.best(MAX_SHARE))
    valley = valleys.lowest(_limit(false_alarm, shoulder), MAX_SHARE)
    if valley is not None:
        why = f"a few tokens stand apart, but fewer than one in {1 / MIN_SHARE:,.0f}"
        result = describe(tail.bottom(*valley), p, why, "valley")
        if result.outlier_share < MIN_SHARE:
            return result
        if result.outlier_share <= MAX_SHARE and result.ratio >= MIN_RATIO:
            why = (
                f"a second mode at {result.ratio:.3g} times the typical norm, apart from the bulk, "
                f"with {result.outlier_share:.2%} of the tokens"
            )
            return replace(result, verdict="artifacts", confidence=1 - p, reason=why)
    for limit, share, why in (
        (critical_value(false_alarm), 0.5, f"a second mode with more than {MAX_SHARE:.0%} of the tokens: no outliers"),
        (_limit(false_alarm, True), MAX_SHARE, "some tokens stand apart, too few to tell from a long tail; try more"),
    ):
        valley = valleys.lowest(limit, share)
        if valley is not None:
            return describe(tail.bottom(*valley), p, why, "valley")
    if shoulder:
        why = "more tokens far above the bulk than its tail explains, but no clear valley before them; try more images"
        return describe(_robust_bin(counts), p, why, "robust")
    power = _power(counts, false_alarm)
    if power < 0.5:
        kind = f"{REFERENCE_SHARE:.0%} of the tokens at {REFERENCE_RATIO:g} times the norm"
        why = f"no second mode, but the usual artifacts ({kind}) would be missed: too few tokens, or norms too spread"
        return describe(None, p, why)
    return describe(None, p, "no small group of tokens above the bulk", verdict="none", confidence=power)


def _robust_bin(counts: Counts) -> int:
    """Return the edge at median plus five robust standard deviations of log norms, but at least twice the median."""
    middle = math.log(quantile(counts, 0.5))
    width = (math.log(quantile(counts, 0.75)) - math.log(quantile(counts, 0.25))) / 1.349
    limit = math.exp(middle + max(ROBUST_WIDTHS * width, math.log(MIN_RATIO)))
    return min(int(np.searchsorted(EDGES, limit)), NUM_BINS - 1)


def _limit(false_alarm: float, shoulder: bool) -> float:
    return critical_value(min(0.5, EASIER * false_alarm) if shoulder else false_alarm)


def _power(counts: Counts, false_alarm: float) -> float:
    """Return the probability of finding the usual artifacts: plant them, spread like the bulk, and test."""
    cumulative, planted = np.cumsum(counts), counts.copy()
    number = max(1, round(REFERENCE_SHARE * int(cumulative[-1])))
    ranks = (np.arange(min(number, 1000)) + 0.5) / min(number, 1000) * cumulative[-1]
    places = np.searchsorted(cumulative, ranks) + round(math.log(REFERENCE_RATIO) / LOG_BIN)
    np.add.at(planted, np.minimum(places, NUM_BINS - 1), max(1, number // 1000))
    tail = Tail.of(planted)
    statistic = tail.scan().best(MAX_SHARE)
    if statistic <= 0:
        return 0.0
    spread = statistic / math.sqrt(number)
    margin = statistic - _limit(false_alarm, tail.has_shoulder(false_alarm))
    return 0.5 * (1 + math.erf(margin / (math.sqrt(2) * spread)))
