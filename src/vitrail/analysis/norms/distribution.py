"""Norms of patch tokens over layers: distributions, the threshold of artifacts, since which layer, in which pictures.

:class:`NormAccumulator` sees batch after batch and keeps fixed-size counts, so its memory does not depend on the
number of pictures. Counts are whole numbers and sums are exact, so any split of the pictures over batches or
processes gives the same result, to the last bit. :func:`analyse_norms` is the same for norms that are all there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.exact_sum import exact_sum
from vitrail.analysis.norms.modes import EDGES, NUM_BINS, Counts
from vitrail.analysis.norms.threshold import (
    FALSE_ALARM,
    Threshold,
    Verdict,
    bins_of,
    count_norms,
    quantile,
    threshold_of_counts,
)
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens.layout import TokenLayout

QUANTILES = (1, 5, 25, 50, 75, 95, 99)
MOST_NAMED = 100
"""How many places of norms that are not finite are named; all of them are counted."""


@dataclass(frozen=True)
class LayerNorms(Result):
    """The norms that leave one layer.

    Attributes:
        layer: index of the layer.
        quantiles: norm by percentage ("1", "5", "25", "50", "75", "95", "99"), to within a bin of 0.45 %, and "max".
        mean, std: of the finite norms.
        found: this layer's own threshold and verdict; written down, its fields stand beside the others.
        share_above_last: share of this layer's tokens above the *last* layer's threshold; None without one.
        pictures_with_outliers: pictures with at least one token above this layer's own threshold.
    """

    layer: int
    quantiles: dict[str, float]
    mean: float
    std: float
    found: Threshold
    share_above_last: float | None
    pictures_with_outliers: int

    def to_dict(self) -> dict[str, object]:
        """Give the fields as plain values, the threshold's among them."""
        values = super().to_dict()
        return {**values.pop("found"), **values}


@dataclass(frozen=True)
class NotFinite(Result):
    """Tokens of one picture whose norm is not finite after one layer."""

    picture: int
    layer: int
    tokens: int


@dataclass(frozen=True)
class Histogram(Result):
    """Counts between neighbouring ``edges``, which are evenly spaced in log norm."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Norms(Result):
    """Norms of patch tokens over layers. What is said without naming a layer is about the last one.

    Attributes:
        threshold, outlier_share, verdict, confidence, method, typical, ratio, p_value, reason: as in
            :class:`~vitrail.analysis.norms.threshold.Threshold`, of the last layer.
        num_pictures, num_tokens: what was looked at, per layer.
        num_not_finite: tokens whose norm is not finite, over all layers.
        not_finite: where they are; the first hundred places by picture and layer.
        onset: first layer from which on every layer has artifacts; None where the last one has none.
        pictures_with_outliers: pictures with at least one outlier.
        per_layer: the same for each layer.
        histogram: distribution after the last layer.
        outliers_per_picture: number of outliers in each picture; None from a stream.
        maps: (B, t, h, w), norms after the last layer; None from a stream.
        outliers: (B, P) bool, finite norms above the threshold; None from a stream.
    """

    threshold: float | None
    outlier_share: float
    verdict: Verdict
    confidence: float
    method: str
    typical: float
    ratio: float
    p_value: float
    reason: str
    num_pictures: int
    num_tokens: int
    num_not_finite: int
    not_finite: list[NotFinite]
    onset: int | None
    pictures_with_outliers: int
    per_layer: list[LayerNorms]
    histogram: Histogram
    outliers_per_picture: list[int] | None = None
    maps: Tensor | None = field(default=None, compare=False, repr=False, metadata={"json": False})
    outliers: Tensor | None = field(default=None, compare=False, repr=False, metadata={"json": False})


def analyse_norms(
    norms: Tensor,
    layout: TokenLayout,
    *,
    layers: Sequence[int] | None = None,
    pictures: Sequence[int] | None = None,
    false_alarm: float = FALSE_ALARM,
) -> Norms:
    """Summarise norms of patch tokens and find artifacts.

    Args:
        norms: (L, B, P), norms of the patch tokens that leave each layer, before the final norm layer.
        layout: its grid shapes the maps.
        layers: indices of the L layers, where they are not all of them; the last one is the one that counts.
        pictures: indices by which pictures are named; counted from 0 by default.
        false_alarm: how often a clean layer may be taken for one with artifacts.
    """
    _check(norms)
    if norms.shape[2] != layout.num_patches:
        raise UnsupportedInput(
            f"norms are (layers, pictures, patches) with {layout.num_patches} patches in a grid of {layout.grid}; got "
            f"{tuple(norms.shape)}. Leave out class and register tokens: tokens[:, layout.patches]"
        )
    stream = NormAccumulator(len(norms) if layers is None else layers, false_alarm=false_alarm)
    result = stream.add(norms, pictures).result()
    last = norms[-1].detach().float()
    outliers = torch.zeros_like(last, dtype=torch.bool)
    if result.threshold is not None:
        outliers = (last > result.threshold) & last.isfinite()
    maps = last.reshape(len(last), *layout.grid)
    return replace(result, outliers_per_picture=outliers.sum(1).tolist(), maps=maps, outliers=outliers)


class NormAccumulator:
    """Norms of a stream of batches, in memory that does not grow.

    Several processes each feed their own; ``merge`` then gives exactly what one process would have got.

    >>> first, second = NormAccumulator(12), NormAccumulator(12)
    >>> _ = first.add(torch.rand(12, 8, 196)), second.add(torch.rand(12, 4, 196), pictures=range(8, 12))
    >>> first.merge(second).result().num_pictures
    12
    """

    def __init__(self, layers: int | Sequence[int], *, false_alarm: float = FALSE_ALARM) -> None:
        self.layers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise InvalidOption(f"layers is a number of layers or their indices, each once; got {layers!r}")
        threshold_of_counts(np.zeros(NUM_BINS, np.int64), false_alarm=false_alarm)  # Refuses a bad level now.
        self.false_alarm = false_alarm
        self.num_pictures = 0
        shape = (len(self.layers), NUM_BINS)
        self._tokens = np.zeros(shape, np.int64)
        self._medians = np.zeros(shape, np.int64)  # Each picture's median, counted once for each of its finite tokens.
        self._maxima = np.zeros(shape, np.int64)
        self._largest = np.full(shape[0], -math.inf)
        self._sums = [(Fraction(0), Fraction(0))] * shape[0]
        self._num_not_finite = np.zeros(shape[0], np.int64)
        self._not_finite: dict[tuple[int, int], int] = {}

    def add(self, norms: Tensor, pictures: Sequence[int] | None = None) -> Self:
        """Add a batch of norms (L, B, P); grids may differ from batch to batch.

        ``pictures`` are the indices by which pictures are named; without them they are numbered as they come.
        """
        _check(norms)
        number = norms.shape[1]
        names = range(self.num_pictures, self.num_pictures + number) if pictures is None else pictures
        if len(norms) != len(self.layers) or len(names) != number:
            raise UnsupportedInput(
                f"expected norms of {len(self.layers)} layers and {len(names)} pictures; got {tuple(norms.shape)}"
            )
        counted = [count_norms(layer.float()) for layer in norms]  # First of all: it refuses what are no norms.
        for place, (layer, (counts, not_finite)) in enumerate(zip(norms, counted, strict=True)):
            values = layer.detach().float().cpu()
            finite = values.isfinite()
            per_picture = finite.sum(1)
            usable = per_picture > 0
            self._tokens[place] += counts
            medians = values.where(finite, torch.nan).nanmedian(1).values[usable]
            np.add.at(self._medians[place], bins_of(medians).numpy(), per_picture[usable].numpy())
            largest = values.where(finite, -math.inf).amax(1)[usable]
            np.add.at(self._maxima[place], bins_of(largest).numpy(), 1)
            self._largest[place] = max(self._largest[place], *largest.tolist(), -math.inf)
            present = values[finite].double().numpy()
            total, squares = self._sums[place]
            self._sums[place] = total + exact_sum(present), squares + exact_sum(present**2)
            self._num_not_finite[place] += not_finite
            for picture in (per_picture < values.shape[1]).nonzero().flatten().tolist():
                self._name(int(names[picture]), self.layers[place], values.shape[1] - int(per_picture[picture]))
        self.num_pictures += number
        return self

    def merge(self, other: NormAccumulator) -> Self:
        """Add what another accumulator has seen; the other one stays as it is."""
        if (other.layers, other.false_alarm) != (self.layers, self.false_alarm):
            raise InvalidOption("only accumulators with the same layers and the same false_alarm can be merged")
        self.num_pictures += other.num_pictures
        self._tokens += other._tokens
        self._medians += other._medians
        self._maxima += other._maxima
        self._largest = np.maximum(self._largest, other._largest)
        self._sums = [(a + c, b + d) for (a, b), (c, d) in zip(self._sums, other._sums, strict=True)]
        self._num_not_finite += other._num_not_finite
        for (picture, layer), tokens in list(other._not_finite.items()):
            self._name(picture, layer, tokens)
        return self

    def result(self) -> Norms:
        """Summarise everything seen so far."""
        if not self.num_pictures:
            raise UnsupportedInput("there are no norms to analyse: no picture was added")
        found = [self._find(place) for place in range(len(self.layers))]
        last = found[-1]
        clean = [place for place, one in enumerate(found) if one.verdict != "artifacts"]
        lasting = self.layers[clean[-1] + 1 :] if clean else self.layers
        return Norms(
            **{name: getattr(last, name) for name in Norms.__dataclass_fields__ if hasattr(last, name)}
            | {"num_not_finite": int(self._num_not_finite.sum())},
            num_pictures=self.num_pictures,
            not_finite=[NotFinite(*key, tokens) for key, tokens in sorted(self._not_finite.items())],
            onset=lasting[0] if lasting else None,
            pictures_with_outliers=_above(self._maxima[-1], last.threshold),
            per_layer=[self._summary(place, found[place], last.threshold) for place in range(len(found))],
            histogram=_histogram(self._tokens[-1]),
        )

    def _find(self, place: int) -> Threshold:
        """Find a layer's threshold; whole pictures above it are no artifacts."""
        found = threshold_of_counts(self._tokens[place], int(self._num_not_finite[place]), false_alarm=self.false_alarm)
        outliers = _above(self._tokens[place], found.threshold)
        if found.verdict == "artifacts" and 2 * _above(self._medians[place], found.threshold) >= outliers:
            why = "the second mode is made of whole pictures, most of whose tokens are above the threshold"
            return replace(found, verdict="uncertain", confidence=0.0, reason=why)
        return found

    def _summary(self, place: int, found: Threshold, threshold: float | None) -> LayerNorms:
        counts = self._tokens[place]
        number = int(counts.sum())
        total, squares = self._sums[place]
        quantiles = {str(q): min(quantile(counts, q / 100), float(self._largest[place])) for q in QUANTILES}
        return LayerNorms(
            layer=self.layers[place],
            quantiles={**quantiles, "max": float(self._largest[place]) if number else math.nan},
            mean=float(total / number) if number else math.nan,
            std=math.sqrt(float((squares - total**2 / number) / number)) if number else math.nan,
            found=found,
            share_above_last=None if threshold is None or not number else _above(counts, threshold) / number,
            pictures_with_outliers=_above(self._maxima[place], found.threshold),
        )

    def _name(self, picture: int, layer: int, tokens: int) -> None:
        self._not_finite[picture, layer] = self._not_finite.get((picture, layer), 0) + tokens
        if len(self._not_finite) > MOST_NAMED:
            del self._not_finite[max(self._not_finite)]


def _check(norms: Tensor) -> None:
    if norms.ndim != 3 or 0 in norms.shape:
        raise UnsupportedInput(f"norms are (layers, pictures, patches), one or more each; got {tuple(norms.shape)}")


def _above(counts: Counts, threshold: float | None) -> int:
    """Count what is above a threshold, which is an edge of the bins."""
    return 0 if threshold is None else int(counts[int(np.searchsorted(EDGES, threshold)) :].sum())


def _histogram(counts: Counts) -> Histogram:
    """Join bins, so that at most a hundred are left between the smallest and the largest norm."""
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 1)
    step = math.ceil((last - first) / 100)
    starts = np.arange(first, last, step)
    edges = EDGES[np.append(starts, min(starts[-1] + step, NUM_BINS))]
    return Histogram(edges.tolist(), np.add.reduceat(counts[: starts[-1] + step], starts).tolist())
