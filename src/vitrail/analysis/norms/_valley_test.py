"""Test for a second mode above the bulk of the norms, on their histogram.

The null hypothesis is any density of log norms that only falls above the bulk, however heavy its tail. For
neighboring intervals I (the valley) and J (the second mode), such a density puts at most the share
``|J| / (|I| + |J|)`` of their tokens into J. The statistic is the binomial likelihood ratio of the real share,
maximized over valleys and modes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitrail.analysis.norms._histogram import LOG_BIN, NUM_BINS, Counts, Floats

MIN_OUTLIERS = 3
MIN_RATIO = 2.0
"""Artifacts have at least this multiple of the typical norm. The modes of a bimodal bulk are usually closer."""
MAX_SHARE, MIN_SHARE = 0.2, 1e-4
MAX_DEPTH = 0.5
"""A valley has at most this share of the density of the mode above it, however many tokens there are."""
CELLS, MIN_CELL = 96, 6
MODE_ENDS: Floats = np.array([1.0, 0.9, 0.5])
"""A second mode ends at this share of the tokens above its valley, so that a few far tokens do not hide it."""
# Fitted to quantiles of the statistic for a flat tail, the hardest falling one, of 4 to 3,000 tokens in 24 to 96 cells:
# P(statistic > OFFSET + SLOPE · log(1 / p)) ≤ p for p from 0.002 to 0.2. The tests check it.
OFFSET, SLOPE = 4.5, 1.1


def critical_value(p: float) -> float:
    """Return the value that the statistic exceeds with probability ``p`` at most without a second mode."""
    return OFFSET + SLOPE * math.log(1 / p)


def p_value(statistic: float) -> float:
    """Return the probability of a statistic this large without a second mode."""
    return min(1.0, math.exp((OFFSET - statistic) / SLOPE))


@dataclass(frozen=True)
class Valleys:
    """The clearest valley before each cell, for each way to end the mode above it."""

    statistic: Floats  # how clear the valley is; 0 without one
    start: Counts  # the cell where the valley starts
    mode_end: Counts  # the cell where the mode ends
    share: Floats  # share of the tokens above each cell

    def best(self, share: float) -> float:
        """Return the statistic of the clearest valley with at most this share of the tokens above it."""
        return float(self.statistic[self.share <= share].max(initial=0.0))

    def lowest(self, limit: float, share: float) -> tuple[int, int, int] | None:
        """Return start and end of the lowest clear valley, and the end of the mode above it."""
        found, top = None, len(self.statistic)
        while True:
            inside = np.where((self.share <= share)[:, None] & (self.mode_end < top), self.statistic, 0.0)
            if inside.max() < limit:
                return found
            end, way = (int(i) for i in np.unravel_index(inside.argmax(), inside.shape))
            found = int(self.start[end, way]), end, int(self.mode_end[end, way])
            top = end + 1  # Look for another one below, whose mode ends where this valley does.


@dataclass(frozen=True)
class Tail:
    """The histogram above the mode of the bulk, in cells of equal width; ``at`` are their edges, as bins."""

    counts: Counts
    cumulative: Floats
    at: Counts

    @classmethod
    def of(cls, counts: Counts) -> Tail:
        """Find the mode of the bulk, and divide what is above it into cells."""
        cumulative = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
        middle, far = np.searchsorted(cumulative, [0.5 * cumulative[-1], 0.8 * cumulative[-1]], side="left")
        far = min(int(far), int(middle) + round(math.log(1.5) / LOG_BIN))
        last = int(np.flatnonzero(counts)[-1]) + 1
        # The bulk's mode is above its median where log norms are skewed to the left. It is in the narrowest window
        # with a fifth of the tokens.
        first = np.arange(int(middle) - 1, max(far, int(middle)))
        window = np.searchsorted(cumulative, cumulative[first] + 0.2 * cumulative[-1], side="left") - first
        mode = int(first[window.argmin()])
        step = max(MIN_CELL, math.ceil((last - mode) / CELLS))
        at = np.minimum(mode + step * np.arange(math.ceil((last - mode) / step) + 1), NUM_BINS)
        return cls(counts, cumulative, at)

    def scan(self) -> Valleys:
        """Measure every valley that ends before a mode far enough above the bulk."""
        size, total = len(self.at), self.cumulative[-1]
        shape = (size, len(MODE_ENDS))
        statistic, start, mode_end = np.zeros(shape), np.zeros(shape, np.int64), np.full(shape, size)
        below = self.cumulative[self.at]
        ends = np.arange(1, size - 1)
        above = total - below[ends]
        chosen = (above <= total / 2) & (above >= MIN_OUTLIERS) & (self._ratio(below[ends]) >= MIN_RATIO)
        ends, above = ends[chosen], above[chosen]
        # Axes: where a valley ends, where it starts, how the mode above it ends.
        stop = np.searchsorted(below, below[ends, None] + MODE_ENDS * above[:, None] - 1e-9)
        stop = np.maximum(stop, ends[:, None] + 1)
        mode, wide = (below[stop] - below[ends, None])[:, None], (stop - ends[:, None]).astype(np.float64)[:, None]
        valley, width = below[ends, None] - below, (ends[:, None] - np.arange(size)).astype(np.float64)
        valley, width = valley[..., None], width[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            both, expected = valley + mode, wide / (width + wide)
            loss = valley * np.log(valley / (both * (1 - expected)))
            value = mode * np.log(mode / (both * expected)) + np.where(valley > 0, loss, 0.0)
        value[(mode < MIN_OUTLIERS) | (valley * wide > MAX_DEPTH * mode * width)] = 0.0
        value[ends[:, None] <= np.arange(size)] = -np.inf  # a valley starts before it ends
        statistic[ends], start[ends], mode_end[ends] = value.max(axis=1), value.argmax(axis=1), stop
        return Valleys(statistic, start, mode_end, 1 - below / total)

    def _ratio(self, below: Floats) -> Floats:
        """Return median norm above over median norm below edges, from how many tokens are below each."""
        low, high = np.searchsorted(self.cumulative, [below / 2, (below + self.cumulative[-1]) / 2], side="left")
        return np.exp((high - low) * LOG_BIN)

    def bottom(self, start: int, end: int, mode_end: int) -> int:
        """Return the edge in the middle of the lowest stretch of the smoothed density before the second mode."""
        step = int(self.at[1] - self.at[0])
        low, high = int(self.at[start]), int(self.at[mode_end])
        kernel = np.convolve(np.ones(2 * step + 1), np.ones(2 * step + 1))
        padded = np.pad(np.asarray(self.counts[low:high], dtype=np.float64), 2 * step, mode="edge")
        smooth = np.convolve(padded, kernel, mode="valid")
        peak = int(self.at[end]) - low + int(smooth[int(self.at[end]) - low :].argmax())
        before = smooth[: max(peak, 1)]
        lowest = np.flatnonzero(np.isclose(before, before.min(), rtol=1e-9, atol=1e-9))
        runs = np.split(lowest, np.flatnonzero(np.diff(lowest) > 1) + 1)
        longest = max(runs, key=len)
        return low + int(longest[0] + longest[-1] + 1) // 2

    def has_shoulder(self, false_alarm: float) -> bool:
        """Return whether more tokens are far out than the tail of the bulk explains.

        The tail is extrapolated as a power law: in log norm, as straight as it falls from the 70 % to the 90 %
        quantile. The usual heavy-tailed families (lognormal, gamma, Weibull, Student, Pareto) fall faster.
        """
        total = self.cumulative[-1]
        middle, near, far = np.searchsorted(self.cumulative, np.array([0.5, 0.7, 0.9]) * total, side="left")
        left, rest = total - self.cumulative[[near, far]]
        held = rest / left if rest else 0.0
        fall = min(1.0, held + 2 * math.sqrt(held * (1 - held) / max(left, 1.0)) + 1e-9)
        above = total - self.cumulative[self.at]
        expected = np.maximum(left, 1.0) * fall ** (np.maximum(self.at - near, 0) / max(far - near, 1))
        expected = np.maximum(expected, 1e-300)
        distant = (self.at - middle) * LOG_BIN >= math.log(MIN_RATIO)
        candidates = distant & (above >= max(1.0, MIN_SHARE * total)) & (above > expected)
        above, expected = above[candidates], expected[candidates]
        excess = above * np.log(above / expected) - (above - expected)
        return bool(excess.max(initial=0.0) >= math.log(CELLS / false_alarm))
