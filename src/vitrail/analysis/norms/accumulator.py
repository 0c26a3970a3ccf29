"""Norms of patch tokens over layers: distributions, artifacts, the layer they start in, the images that have them.

:class:`NormAccumulator` counts batch by batch, in memory that does not depend on the number of images. Counts are
integers and sums are exact, so any split of the images over batches or ranks gives the same result, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from fractions import Fraction
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import check_shape
from vitrail.analysis.norms._histogram import (
    EDGES,
    NUM_BINS,
    Counts,
    Floats,
    Histogram,
    bins_of,
    count_above,
    count_norms,
    quantile,
)
from vitrail.analysis.norms.prominence import prominence
from vitrail.analysis.norms.threshold import FALSE_ALARM, Finding, Threshold, check_false_alarm, examine, split
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.surgery.hooks import Recording
from vitrail.tokens.layout import TokenLayout

QUANTILES = (1, 5, 25, 50, 75, 95, 99)
MIN_IMAGES = 3
"""Artifacts are in at least so many images: the tokens of one image are not independent of each other."""
LEVELS: Floats = np.geomspace(1.0, 64.0, 33)
COARSE = 8
"""Prominences and norms are counted together in coarse bins: 14 % wide in prominence, eight bins (3.6 %) in norm."""
MOST_NAMED = 100
"""How many places of non-finite norms are listed; all of them are counted."""


class LayerNorms(Threshold):
    """Norms after one layer, with its own threshold and verdict.

    Attributes:
        quantiles: norm by percentage ("1", "5", "25", "50", "75", "95", "99"), to within a bin of 0.45 %, and "max".
        mean, std: of the finite norms.
    """

    layer: int  # index of the layer
    quantiles: dict[str, float]
    mean: float
    std: float
    share_above_last: float | None  # share of this layer's tokens above the *last* layer's threshold; None without one
    images_with_outliers: int  # images with at least one token above this layer's own threshold


class NotFinite(Result):
    """Number of tokens with a non-finite norm in one image after one layer."""

    image: int
    layer: int
    tokens: int


class Norms(Threshold):
    """Norms over layers. Threshold, verdict and all other inherited fields are those of the last layer.

    Attributes:
        num_not_finite: tokens with a non-finite norm, over all layers.
        maps: (B, t, h, w), norms after the last layer; None from an accumulator.
        outliers: (B, P) bool, finite norms above the threshold; None from an accumulator.
    """

    num_images: int  # number of images
    not_finite: list[NotFinite]  # where they are; the first hundred places by image and layer
    onset: int | None  # first layer from which on every layer has artifacts; None if the last one has none
    images_with_outliers: int  # images with at least one outlier
    per_layer: list[LayerNorms]  # the same for each layer
    histogram: Histogram  # distribution after the last layer
    outliers_per_image: list[int] | None = None  # number of outliers in each image; None from an accumulator
    maps: Tensor | None = field(default=None, compare=False, repr=False, metadata={"json": False})
    outliers: Tensor | None = field(default=None, compare=False, repr=False, metadata={"json": False})


@fitting
def analyze_norms(
    norms: Tensor,
    layout: TokenLayout,
    *,
    entry: Tensor | None = None,
    layers: Sequence[int] | None = None,
    images: Sequence[int] | None = None,
    false_alarm: float = FALSE_ALARM,
) -> Norms:
    """Summarize norms of patch tokens and find artifacts.

    Args:
        norms: (L, B, P), norms of patch tokens after each layer, before the final norm layer.
        layout: layout of the tokens; its grid shapes the maps and says which patches are neighbors.
        entry: (B, P), norms of the patches that enter the first block, as ``vitrail.record`` returns them. Without
            these, high norms that the patch embedding gives are not told from artifacts.
        layers: indices of the L layers; by default 0 to L - 1. The verdict is that of the last one.
        images: indices of the B images, for ``not_finite``; by default 0 to B - 1.
        false_alarm: how often a clean layer may get the verdict "artifacts".
    """
    counted = NormAccumulator(len(norms) if layers is None else layers, false_alarm=false_alarm)
    hint = f", for a grid of {layout.grid}. Remove class and register tokens: tokens[:, layout.patches]"
    check_shape(norms, "norms", f"L B {layout.num_patches}", hint)
    result = counted.add(norms, images, entry=entry, grid=layout.grid).result()
    last = norms[-1].detach().float()
    outliers = torch.zeros_like(last, dtype=torch.bool)
    if result.threshold is not None:
        outliers = (last > result.threshold) & last.isfinite()
    maps = last.reshape(len(last), *layout.grid)
    return replace(result, outliers_per_image=outliers.sum(1).tolist(), maps=maps, outliers=outliers)


class NormAccumulator:
    """Norms of a stream of batches, in constant memory.

    Each rank feeds its own accumulator; :meth:`merge` then gives exactly the result of a single process.

    >>> first, second = NormAccumulator(12), NormAccumulator(12)
    >>> _ = first.add(torch.rand(12, 8, 196)), second.add(torch.rand(12, 4, 196), images=range(8, 12))
    >>> first.merge(second).result().num_images
    12
    """

    def __init__(self, layers: int | Sequence[int], *, false_alarm: float = FALSE_ALARM) -> None:
        self.layers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise InvalidOption(f"layers must be a number of layers or distinct indices; got {layers!r}")
        check_false_alarm(false_alarm)
        self.false_alarm = false_alarm
        self.num_images = 0
        self._counts = [_LayerCounts() for _ in self.layers]
        self._not_finite: dict[tuple[int, int], int] = {}

    def add(
        self,
        norms: Tensor,
        images: Sequence[int] | None = None,
        *,
        entry: Tensor | None = None,
        grid: tuple[int, int, int] | None = None,
    ) -> Self:
        """Add a batch of norms (L, B, P); P may differ from batch to batch.

        Args:
            norms: norms of patches after each layer.
            images: indices of the images; by default they are numbered in order of arrival.
            entry: (B, P), norms of the patches that enter the first block.
            grid: grid of the P patches. Without ``entry`` and ``grid``, content is told from artifacts less well; see
                :func:`prominence`.
        """
        check_shape(norms, "norms", f"{len(self.layers)} B P")
        if grid is not None and math.prod(grid) != norms.shape[2]:
            raise UnsupportedInput(f"grid is {grid}, but the norms are of {norms.shape[2]} patches")
        if entry is not None:
            check_shape(entry, "entry", "{} {}".format(*norms.shape[1:]), ": one norm for each patch")
            entry = entry.detach().float().cpu()
        number = norms.shape[1]
        indices = range(self.num_images, self.num_images + number) if images is None else images
        if len(indices) != number:
            raise UnsupportedInput(f"got {len(indices)} indices for {number} images; expected one per image")
        counted = [count_norms(layer.float()) for layer in norms]  # raises before anything is added
        for layer, values, state, (counts, _) in zip(self.layers, norms, self._counts, counted, strict=True):
            missing = state.add(values.detach().float().cpu(), counts, entry, grid)
            for image in missing.nonzero().flatten().tolist():
                self._list_not_finite(int(indices[image]), layer, int(missing[image]))
        self.num_images += number
        return self

    def add_recording(self, recording: Recording, images: Sequence[int] | None = None) -> Self:
        """Add a recording of ``norms`` and ``entry``, of the layers of this accumulator."""
        patches = recording.layout.patches
        norms = torch.stack([recording.norms[layer][:, patches] for layer in self.layers])
        return self.add(norms, images, entry=recording.entry, grid=recording.layout.grid)

    def merge(self, other: NormAccumulator) -> Self:
        """Add what another accumulator has counted; the other one does not change."""
        if (other.layers, other.false_alarm) != (self.layers, self.false_alarm):
            raise InvalidOption("only accumulators with the same layers and the same false_alarm can be merged")
        self.num_images += other.num_images
        for mine, theirs in zip(self._counts, other._counts, strict=True):
            mine.merge(theirs)
        for (image, layer), tokens in list(other._not_finite.items()):
            self._list_not_finite(image, layer, tokens)
        return self

    def result(self) -> Norms:
        """Summarize everything added so far."""
        if not self.num_images:
            raise UnsupportedInput("there are no norms to analyze: no image was added")
        found = [state.threshold(self.false_alarm) for state in self._counts]
        last, final = found[-1], self._counts[-1]
        clean = [place for place, one in enumerate(found) if one.verdict != "artifacts"]
        lasting = self.layers[clean[-1] + 1 :] if clean else self.layers
        per_layer = [
            state.summary(layer, own, last.threshold)
            for layer, state, own in zip(self.layers, self._counts, found, strict=True)
        ]
        return Norms(
            **vars(replace(last, num_not_finite=sum(state.not_finite for state in self._counts))),
            num_images=self.num_images,
            not_finite=[NotFinite(*key, tokens) for key, tokens in sorted(self._not_finite.items())],
            onset=lasting[0] if lasting else None,
            images_with_outliers=count_above(final.maxima, last.threshold),
            per_layer=per_layer,
            histogram=Histogram.of(final.tokens),
        )

    def _list_not_finite(self, image: int, layer: int, tokens: int) -> None:
        self._not_finite[image, layer] = self._not_finite.get((image, layer), 0) + tokens
        if len(self._not_finite) > MOST_NAMED:
            del self._not_finite[max(self._not_finite)]


class _LayerCounts:
    """Histograms and exact sums of one layer: norms and prominences, of all tokens and the largest of each image."""

    def __init__(self) -> None:
        self.tokens, self.maxima, self.prominence, self.peaks = (np.zeros(NUM_BINS, np.int64) for _ in range(4))
        self.both = np.zeros((len(LEVELS) + 1, NUM_BINS // COARSE), np.int64)  # by prominence, then by norm
        self.largest = -math.inf
        self.total = self.squares = Fraction(0)
        self.not_finite = 0

    def add(
        self, norms: Tensor, counts: Counts, entry: Tensor | None = None, grid: tuple[int, int, int] | None = None
    ) -> Tensor:
        """Add norms (B, P) and their counts; return how many are not finite in each image (B,)."""
        finite = norms.isfinite()
        per_image = finite.sum(1)
        usable = per_image > 0
        self.tokens += counts
        largest = norms.where(finite, -math.inf).amax(1)[usable]
        np.add.at(self.maxima, bins_of(largest).numpy(), 1)
        self._add_prominence(norms[usable], None if entry is None else entry[usable], grid)
        self.largest = max(self.largest, *largest.tolist(), -math.inf)
        values = norms[finite].double().numpy()
        self.total += exact_sum(values)
        self.squares += exact_sum(values**2)
        missing = norms.shape[1] - per_image
        self.not_finite += int(missing.sum())
        return missing

    def _add_prominence(self, norms: Tensor, entry: Tensor | None, grid: tuple[int, int, int] | None) -> None:
        values = prominence(norms, entry, grid)
        finite = values.isfinite()
        self.prominence += count_norms(values[finite])[0]
        np.add.at(self.peaks, bins_of(values.where(finite, 0.0).amax(1)).numpy(), 1)
        level = torch.bucketize(values[finite], torch.from_numpy(LEVELS)).numpy()
        np.add.at(self.both, (level, bins_of(norms[finite]).numpy() // COARSE), 1)

    def merge(self, other: _LayerCounts) -> None:
        self.largest = max(self.largest, other.largest)
        self.tokens += other.tokens
        self.maxima += other.maxima
        self.prominence += other.prominence
        self.peaks += other.peaks
        self.both += other.both
        self.total += other.total
        self.squares += other.squares
        self.not_finite += other.not_finite

    def threshold(self, false_alarm: float) -> Threshold:
        """Judge the layer by its prominences; then find the norm that separates outliers, or that content explains."""
        found, at = examine(self.prominence, false_alarm=false_alarm), None
        if found.at is not None:
            at, images = self._separating_edge(found.at), int(self.peaks[found.at :].sum())
            if found.verdict == "artifacts" and images < MIN_IMAGES:
                found = found.doubt(
                    f"tokens stand apart in {images} of the images only, and at least {MIN_IMAGES} are needed"
                )
        elif found.verdict == "none":
            high = examine(self.tokens, false_alarm=false_alarm)
            if high.at is not None:
                found, at = _explained(found, high, split(self.tokens, high.at)[0]), high.at
        return found.describe(self.tokens, self.not_finite, at)

    def _separating_edge(self, at: int) -> int:
        """Return the norm, as an edge of the bins, that best separates tokens of high prominence from the others.

        Both kinds count equally: the share of each on its own side is maximized. Of a gap it is the middle.
        """
        level = int(np.searchsorted(LEVELS, EDGES[at] * (1 + 1e-9), side="right"))
        high, low = self.both[level:].sum(0), self.both[:level].sum(0)
        right = np.cumsum(low) / max(low.sum(), 1) + 1 - np.cumsum(high) / max(high.sum(), 1)
        best = np.flatnonzero(np.isclose(right, right.max(), rtol=0, atol=1e-12))
        longest = max(np.split(best, np.flatnonzero(np.diff(best) > 1) + 1), key=len)
        return COARSE * (int(longest[0] + longest[-1] + 2) // 2)

    def summary(self, layer: int, found: Threshold, last_threshold: float | None) -> LayerNorms:
        number = int(self.tokens.sum())
        quantiles = {str(q): min(quantile(self.tokens, q / 100), self.largest) for q in QUANTILES}
        variance = float((self.squares - self.total**2 / number) / number) if number else math.nan
        above = count_above(self.tokens, last_threshold)
        return LayerNorms(
            **vars(found),
            layer=layer,
            quantiles={**quantiles, "max": self.largest if number else math.nan},
            mean=float(self.total / number) if number else math.nan,
            std=math.sqrt(variance),
            share_above_last=None if last_threshold is None or not number else above / number,
            images_with_outliers=count_above(self.maxima, found.threshold),
        )


def _explained(found: Finding, high: Finding, share: float) -> Finding:
    """Return the verdict on high norms where no token is prominent."""
    why = (
        f"{share:.2%} of the tokens have a high norm, but content explains it: they had it when they entered the "
        "model, share it with their neighbors, or are whole images"
    )
    return replace(found, verdict="content", method=high.method, reason=why)


def exact_sum(values: Floats) -> Fraction:
    """Add floats without rounding, so that neither order nor split matters; much faster than summing fractions."""
    total = Fraction(0)
    for part in np.split(values, range(1 << 24, len(values), 1 << 24)):
        mantissa, exponent = np.frexp(part)
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        exponents, group = np.unique(exponent, return_inverse=True)
        # Two halves of at most 27 bits: their float64 sums over 2²⁴ numbers are exact.
        high, low = (np.bincount(group, half.astype(np.float64)) for half in (whole >> 27, whole & ((1 << 27) - 1)))
        for power, upper, lower in zip(exponents.tolist(), high, low, strict=True):
            total += ((int(upper) << 27) + int(lower)) * Fraction(2) ** (power - 53)
    return total
