"""Where the norms of artifact tokens begin, for one layer of one model, and whether there are any.

Everything is computed from a histogram over fixed, log-spaced bins, so that a tensor, a stream of batches and the
sum of several processes' counts give the same answer. A threshold is the edge of a bin, and bins hold what is
above their lower edge, so ``norms > threshold`` counts exactly what the histogram counts.

Artifacts are a second mode: the density of log norms rises again above the bulk (``valleys.py`` has the test).
``docs/detector.md`` tells what the answer means, and its rates of error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.norms.modes import (
    EDGES,
    LOG_BIN,
    MAX_SHARE,
    MIN_RATIO,
    MIN_SHARE,
    NUM_BINS,
    Counts,
    Tail,
    critical,
    p_value,
)
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput

Verdict = Literal["artifacts", "none", "uncertain"]
Method = Literal["valley", "robust", "none"]
FALSE_ALARM = 0.01
MIN_TOKENS = 64
REFERENCE_SHARE, REFERENCE_RATIO = 0.02, 5.0
"""The artifacts that "none" rules out: the share and the norm that are usual in large models."""
ROBUST_WIDTHS = 5.0
EASIER = 10.0
"""Where the bulk's tail does not explain the tokens above it, a valley this many times less rare is enough."""


@dataclass(frozen=True)
class Threshold(Result):
    """Whether one layer has artifact tokens, and from which norm on.

    Attributes:
        threshold: tokens with ``norm > threshold`` are outliers; None where there is nothing to separate.
        verdict: "artifacts", "none", or "uncertain" where these norms do not allow either answer.
        confidence: chance of being right, by the test's own model. "artifacts": one minus the chance that a
            clean distribution shows such a valley. "none": the chance that artifacts of the usual kind (2 % of the
            tokens at five times the norm) would have been found among these tokens. "uncertain": 0, no answer.
        method: "valley" between two modes, "robust" limit from median and spread, or "none".
        outlier_share: share of the finite tokens above the threshold; 0 without a threshold.
        typical: median norm of the tokens that are not outliers.
        ratio: median norm of the outliers over ``typical``; not a number without outliers.
        p_value: chance that a clean distribution of one mode shows a valley as clear as the clearest one here.
        num_tokens: all tokens, those included whose norm is not finite.
        num_not_finite: tokens whose norm is not finite; they count nowhere else.
        reason: the verdict in words.
    """

    threshold: float | None
    verdict: Verdict
    confidence: float
    method: Method
    outlier_share: float
    typical: float
    ratio: float
    p_value: float
    num_tokens: int
    num_not_finite: int
    reason: str


def find_threshold(norms: Tensor, *, false_alarm: float = FALSE_ALARM) -> Threshold:
    """Find artifact tokens among the norms of one layer, of any shape.

    Args:
        norms: norms of patch tokens before the final norm layer; class and register tokens do not belong here.
        false_alarm: how often a clean distribution may be taken for one with artifacts.

    Example:
        >>> norms = torch.cat([torch.linspace(30, 60, 5000), torch.linspace(300, 400, 100)])
        >>> found = find_threshold(norms)
        >>> found.verdict, round(found.outlier_share, 3), 60 < found.threshold < 300
        ('artifacts', 0.02, True)
    """
    counts, not_finite = count_norms(norms)
    return threshold_of_counts(counts, not_finite, false_alarm=false_alarm)


def count_norms(norms: Tensor) -> tuple[Counts, int]:
    """Count norms into the bins; give the counts and how many norms are not finite.

    Bin i holds what is above edge i and not above edge i + 1; the first and the last bin hold the rest, too.
    """
    if not isinstance(norms, Tensor) or norms.is_complex() or norms.dtype is torch.bool:
        raise UnsupportedInput(f"norms are a tensor of real numbers; got {getattr(norms, 'dtype', type(norms))}")
    counts = np.zeros(NUM_BINS, dtype=np.int64)
    not_finite = 0
    for part in norms.detach().reshape(-1).split(1 << 22):
        values = part.cpu().double()
        finite = values[values.isfinite()]
        if finite.numel() and finite.min() < 0:
            raise UnsupportedInput(
                f"norms are 0 or more; got {finite.min().item():.4g}. Give the tokens' lengths, not features"
            )
        not_finite += values.numel() - finite.numel()
        counts += torch.bincount(bins_of(finite), minlength=NUM_BINS).numpy()
    return counts, not_finite


def bins_of(norms: Tensor) -> Tensor:
    """Give the bin of each norm; all of them finite, on the CPU."""
    return torch.bucketize(norms.double(), torch.from_numpy(EDGES[1:-1]))


def quantile(counts: Counts, q: float) -> float:
    """Give a quantile of the counted norms, interpolated within its bin; not a number where nothing was counted."""
    total = int(counts.sum())
    if not total:
        return math.nan
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    rank = min(max(q * total, 0.5), total - 0.5)
    index = min(int(np.searchsorted(cumulative, rank, side="left")), NUM_BINS) - 1
    inside = (rank - cumulative[index]) / counts[index]
    return float(EDGES[index] * (EDGES[index + 1] / EDGES[index]) ** inside)


def threshold_of_counts(counts: Counts, num_not_finite: int = 0, *, false_alarm: float = FALSE_ALARM) -> Threshold:
    """Find the threshold from counts over the fixed bins, as :func:`count_norms` gives them."""
    if not 0 < false_alarm <= 0.2:
        raise InvalidOption(f"false_alarm is a probability above 0 and at most 0.2, such as 0.01; got {false_alarm!r}")
    total = int(counts.sum())
    plain = _describe(counts, num_not_finite, None, 1.0)
    if total < MIN_TOKENS:
        why = f"only {total} tokens with a finite norm; at least {MIN_TOKENS} are needed, and a few pictures are better"
        return replace(plain, reason=why)
    tail = Tail.of(counts)
    valleys, shoulder = tail.scan(), tail.has_shoulder(false_alarm)
    p = p_value(valleys.best(MAX_SHARE))
    found = valleys.lowest(_limit(false_alarm, shoulder), MAX_SHARE)
    if found is not None:
        result = replace(_describe(counts, num_not_finite, tail.bottom(*found), p), method="valley")
        if result.outlier_share < MIN_SHARE:
            return replace(result, reason=f"a few tokens stand apart, but fewer than one in {1 / MIN_SHARE:,.0f}")
        if result.outlier_share <= MAX_SHARE and result.ratio >= MIN_RATIO:
            why = (
                f"a second mode at {result.ratio:.3g} times the typical norm, apart from the bulk, "
                f"with {result.outlier_share:.2%} of the tokens"
            )
            return replace(result, verdict="artifacts", confidence=1 - p, reason=why)
    for limit, share, why in (
        (critical(false_alarm), 0.5, f"a second mode, but with more than {MAX_SHARE:.0%} of the tokens: no outliers"),
        (_limit(false_alarm, True), MAX_SHARE, "some tokens stand apart, too few to tell from a long tail; try more"),
    ):
        found = valleys.lowest(limit, share)
        if found is not None:
            at = tail.bottom(*found)
            return replace(_describe(counts, num_not_finite, at, p), method="valley", reason=why)
    if shoulder:
        why = (
            "more tokens far above the bulk than its tail explains, but no clear valley before them; try more pictures"
        )
        return replace(_describe(counts, num_not_finite, _robust_bin(counts), p), method="robust", reason=why)
    return _one_mode(replace(plain, p_value=p), counts, false_alarm)


def _one_mode(result: Threshold, counts: Counts, false_alarm: float) -> Threshold:
    """Say whether there are no artifacts, or whether these tokens could not show them."""
    power = _power(counts, false_alarm)
    if power < 0.5:
        kind = f"{REFERENCE_SHARE:.0%} of the tokens at {REFERENCE_RATIO:g} times the norm"
        why = f"no second mode, but the usual artifacts ({kind}) would be missed: too few tokens, or norms too spread"
        return replace(result, reason=why)
    return replace(result, verdict="none", confidence=power, reason="no small group of tokens above the bulk")


def _describe(counts: Counts, num_not_finite: int, at: int | None, p: float) -> Threshold:
    """Describe the tokens below and above an edge; uncertain until somebody says more."""
    total = int(counts.sum())
    below, above = counts.copy(), counts.copy()
    below[NUM_BINS if at is None else at :] = 0
    above[: NUM_BINS if at is None else at] = 0
    typical = quantile(below, 0.5)
    return Threshold(
        threshold=None if at is None else float(EDGES[at]),
        verdict="uncertain",
        confidence=0.0,
        method="none",
        outlier_share=int(above.sum()) / total if total else 0.0,
        typical=typical,
        ratio=quantile(above, 0.5) / typical,
        p_value=p,
        num_tokens=total + num_not_finite,
        num_not_finite=num_not_finite,
        reason="",
    )


def _robust_bin(counts: Counts) -> int:
    """Give the edge at median plus five robust standard deviations of log norms, and at twice the median or more."""
    middle = math.log(quantile(counts, 0.5))
    width = (math.log(quantile(counts, 0.75)) - math.log(quantile(counts, 0.25))) / 1.349
    limit = math.exp(middle + max(ROBUST_WIDTHS * width, math.log(MIN_RATIO)))
    return min(int(np.searchsorted(EDGES, limit)), NUM_BINS - 1)


def _limit(false_alarm: float, shoulder: bool) -> float:
    return critical(min(0.5, EASIER * false_alarm) if shoulder else false_alarm)


def _power(counts: Counts, false_alarm: float) -> float:
    """Chance of finding the usual artifacts among these tokens: plant them, shaped like the bulk, and test."""
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
