"""Detector of artifact tokens in one layer, and the norm they start at.

Artifacts are a second mode: the density of log norms, or of log prominences, rises again above the bulk. Everything is
computed from a histogram over fixed bins, so a tensor, a stream of batches and the sum over ranks give the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis.norms._histogram import EDGES, LOG_BIN, NUM_BINS, Counts, count_norms, quantile
from vitrail.analysis.norms._valley_test import (
    MAX_SHARE,
    MIN_OUTLIERS,
    MIN_RATIO,
    MIN_SHARE,
    Tail,
    critical_value,
    p_value,
)
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption

Verdict = Literal["artifacts", "content", "none", "uncertain"]
Method = Literal["valley", "robust", "none"]
FALSE_ALARM = 0.01
MIN_TOKENS = 64
SHARES, MULTIPLES = (0.001, 0.005, 0.02, 0.05), (2.0, 3.0, 5.0, 10.0)
"""The artifacts whose visibility is stated: shares of the tokens, and multiples of their norm."""
USUAL = (0.02, 5.0)
"""The artifacts that "none" rules out: the share and the norm that are usual in large models."""
ROBUST_WIDTHS = 5.0
EASIER = 10.0
"""Where the bulk's tail does not explain the tokens above it, a p-value this many times larger is enough."""


class Threshold(Result):
    """Verdict on artifact tokens in one layer, and the norm they start at.

    Attributes:
        confidence: "artifacts": one minus the probability that a clean distribution shows such a valley. "none" and
            "content": the mean of ``power`` over all shares at three times the norm or more, the probability that
            artifacts of an unknown kind would have been found here. "uncertain": 0.
        p_value: probability that a clean distribution with one mode shows a valley as clear as the clearest one here.
        power: probability that artifacts would have been found among these tokens, by share of the tokens and multiple
            of the norm: ``power["0.5%"]["10"]``. It never falls from one share or multiple to a larger one. Empty for
            fewer than 64 tokens.
    """

    threshold: float | None  # tokens with ``norm > threshold`` are outliers; None if there is nothing to separate
    verdict: Verdict  # "artifacts", "content" (high norms that content explains), "none", or "uncertain"
    confidence: float
    method: Method  # "valley" between two modes, "robust" limit from median and spread, or "none"
    outlier_share: float  # share of the finite tokens above the threshold; 0 without a threshold
    typical: float  # median norm of the tokens that are not outliers
    ratio: float  # median norm of the outliers over ``typical``; NaN without outliers
    p_value: float
    num_tokens: int  # all tokens, including those with a non-finite norm
    num_not_finite: int  # tokens with a non-finite norm; nothing else counts them
    reason: str  # the verdict in words
    power: dict[str, dict[str, float]]


@fitting
def find_threshold(norms: Tensor, *, false_alarm: float = FALSE_ALARM) -> Threshold:
    """Find artifact tokens among the norms of one layer, of any shape.

    Norms alone cannot tell artifacts from content with a high norm: :func:`analyze_norms` also uses the places of the
    tokens and their norms at the entry of the model.

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
    counts, num_not_finite = count_norms(norms)
    finding = examine(counts, false_alarm=false_alarm)
    return finding.describe(counts, num_not_finite, finding.at)


def check_false_alarm(value: float) -> None:
    """Raise unless the p-value is calibrated at this level."""
    if not 0 < value <= 0.2:
        raise InvalidOption(f"false_alarm must be a probability above 0 and at most 0.2, such as 0.01; got {value!r}")


@dataclass(frozen=True)
class Finding:
    """What a histogram shows; ``at`` is the edge above which it has outliers."""

    at: int | None
    verdict: Verdict
    method: Method
    p_value: float
    reason: str
    confidence: float = 0.0
    power: tuple[tuple[float, ...], ...] = ()  # by share, then by multiple

    def describe(self, counts: Counts, num_not_finite: int, at: int | None) -> Threshold:
        """Return the threshold at an edge of the bins of norms, whose counts are given."""
        share, typical, ratio = split(counts, at)
        power = {
            f"{100 * share:g}%": {f"{multiple:g}": value for multiple, value in zip(MULTIPLES, row, strict=True)}
            for share, row in zip(SHARES, self.power, strict=False)
        }
        return Threshold(
            threshold=None if at is None else float(EDGES[at]),
            verdict=self.verdict,
            confidence=self.confidence,
            method="none" if at is None else self.method,
            outlier_share=share,
            typical=typical,
            ratio=ratio,
            p_value=self.p_value,
            num_tokens=int(counts.sum()) + num_not_finite,
            num_not_finite=num_not_finite,
            reason=self.reason,
            power=power,
        )

    def doubt(self, reason: str) -> Finding:
        """Return the same with the verdict "uncertain"."""
        return replace(self, verdict="uncertain", confidence=0.0, reason=reason)


def split(counts: Counts, at: int | None) -> tuple[float, float, float]:
    """Return the share of the tokens above an edge, the median below it, and the ratio of the median above to that."""
    total, edge = int(counts.sum()), NUM_BINS if at is None else at
    below, above = counts.copy(), counts.copy()
    below[edge:], above[:edge] = 0, 0
    typical = quantile(below, 0.5)
    return int(above.sum()) / total if total else 0.0, typical, quantile(above, 0.5) / typical


def examine(counts: Counts, *, false_alarm: float) -> Finding:
    """Look for a second mode in counts over the fixed bins, of norms or of prominences."""
    total = int(counts.sum())
    if total < MIN_TOKENS:
        why = f"only {total} tokens have a finite norm; at least {MIN_TOKENS} are needed; use more images"
        return Finding(None, "uncertain", "none", 1.0, why)
    tail = Tail.of(counts)
    valleys, shoulder = tail.scan(), tail.has_shoulder(false_alarm)
    power = _power(counts, false_alarm)
    nothing = Finding(None, "uncertain", "none", p_value(valleys.best(MAX_SHARE)), "", power=power)
    valley = valleys.lowest(_limit(false_alarm, shoulder), MAX_SHARE)
    if valley is not None:
        at = tail.bottom(*valley)
        share, _, ratio = split(counts, at)
        found = replace(nothing, at=at, method="valley")
        if share < MIN_SHARE:
            return found.doubt(f"a few tokens stand apart, but fewer than one in {1 / MIN_SHARE:,.0f}")
        if share <= MAX_SHARE and ratio >= MIN_RATIO:
            where = f"at {ratio:.3g} times the typical value, apart from the bulk"
            why = f"a second mode {where}, with {share:.2%} of the tokens"
            return replace(found, verdict="artifacts", confidence=1 - found.p_value, reason=why)
    for limit, share, why in (
        (critical_value(false_alarm), 0.5, f"a second mode with more than {MAX_SHARE:.0%} of the tokens: no outliers"),
        (_limit(false_alarm, True), MAX_SHARE, "some tokens stand apart, too few to tell from a long tail; try more"),
    ):
        valley = valleys.lowest(limit, share)
        if valley is not None:
            return replace(nothing, at=tail.bottom(*valley), method="valley", reason=why)
    if shoulder:
        why = "more tokens far above the bulk than its tail explains, but no clear valley before them; try more images"
        return replace(nothing, at=_robust_bin(counts), method="robust", reason=why)
    if power[SHARES.index(USUAL[0])][MULTIPLES.index(USUAL[1])] < 0.5:
        kind = f"{USUAL[0]:.0%} of the tokens at {USUAL[1]:g} times the norm"
        why = (
            f"no second mode, but the usual artifacts ({kind}) could not have been seen: too few tokens, or too spread"
        )
        return nothing.doubt(why)
    far = [value for row in power for multiple, value in zip(MULTIPLES, row, strict=True) if multiple >= 3]
    why = "no small group of tokens above the bulk"
    return replace(nothing, verdict="none", confidence=sum(far) / len(far), reason=why)


def _robust_bin(counts: Counts) -> int:
    """Return the edge at median plus five robust standard deviations of log norms, but at least twice the median."""
    middle = math.log(quantile(counts, 0.5))
    width = (math.log(quantile(counts, 0.75)) - math.log(quantile(counts, 0.25))) / 1.349
    limit = math.exp(middle + max(ROBUST_WIDTHS * width, math.log(MIN_RATIO)))
    return min(int(np.searchsorted(EDGES, limit)), NUM_BINS - 1)


def _limit(false_alarm: float, shoulder: bool) -> float:
    return critical_value(min(0.5, EASIER * false_alarm) if shoulder else false_alarm)


def _power(counts: Counts, false_alarm: float) -> tuple[tuple[float, ...], ...]:
    """Return the probability of finding artifacts, by share and multiple: plant them in the bulk, and test.

    Tokens far above the bulk are left out first, since artifacts that are there would help to find others. Each value
    is the smallest of those for shares and multiples at least as large, so that it never falls.
    """
    bulk = counts.copy()
    bulk[_robust_bin(counts) :] = 0
    found = np.array([[_chance(bulk, share, multiple, false_alarm) for multiple in MULTIPLES] for share in SHARES])
    for axis in (0, 1):
        found = np.flip(np.minimum.accumulate(np.flip(found, axis), axis), axis)
    return tuple(tuple(row) for row in found.tolist())


def _chance(counts: Counts, share: float, multiple: float, false_alarm: float) -> float:
    """Return the probability of finding a share of the tokens at a multiple of their norm, spread like the bulk."""
    cumulative, planted = np.cumsum(counts), counts.copy()
    number = round(share * int(cumulative[-1]))
    if number < MIN_OUTLIERS:
        return 0.0
    ranks = (np.arange(min(number, 1000)) + 0.5) / min(number, 1000) * cumulative[-1]
    places = np.searchsorted(cumulative, ranks) + round(math.log(multiple) / LOG_BIN)
    np.add.at(planted, np.minimum(places, NUM_BINS - 1), max(1, number // 1000))
    tail = Tail.of(planted)
    statistic = tail.scan().best(MAX_SHARE)
    if statistic <= 0:
        return 0.0
    spread = statistic / math.sqrt(number)
    margin = statistic - _limit(false_alarm, tail.has_shoulder(false_alarm))
    return 0.5 * (1 + math.erf(margin / (math.sqrt(2) * spread)))
