"""Histogram of norms over fixed, log-spaced bins.

The bins are fixed so that counts of batches and ranks add up. Bin i holds ``edge[i] < norm <= edge[i + 1]``, so
``norms > edge`` counts exactly what the histogram counts; the first and last bin also hold what lies beyond.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.analysis.result import Result
from vitrail.errors import UnsupportedInput

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NUM_BINS = 8192
LOWEST, HIGHEST = 1e-6, 1e10
LOG_BIN = math.log(HIGHEST / LOWEST) / NUM_BINS
"""Width of a bin in log norm: 0.45 %."""
# Rounded to float32, so that comparing a float32 norm with an edge does not depend on the precision of the comparison.
EDGES: Floats = np.geomspace(LOWEST, HIGHEST, NUM_BINS + 1).astype(np.float32).astype(np.float64)


class Histogram(Result):
    """Counts between neighboring ``edges``, which are evenly spaced in log norm."""

    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, counts: Counts, most: int = 100) -> Histogram:
        """Join bins, so that at most ``most`` are left between the smallest and the largest norm."""
        filled = np.flatnonzero(counts)
        first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 1)
        step = math.ceil((last - first) / most)
        starts = np.arange(first, last, step)
        edges = EDGES[np.append(starts, min(starts[-1] + step, NUM_BINS))]
        return cls(edges.tolist(), np.add.reduceat(counts[: starts[-1] + step], starts).tolist())


def count_norms(norms: Tensor) -> tuple[Counts, int]:
    """Count norms of any shape; return the counts, and the number of non-finite norms."""
    if not isinstance(norms, Tensor) or norms.is_complex() or norms.dtype is torch.bool:
        raise UnsupportedInput(f"norms must be a tensor of real numbers; got {getattr(norms, 'dtype', type(norms))}")
    counts = np.zeros(NUM_BINS, dtype=np.int64)
    not_finite = 0
    for part in norms.detach().reshape(-1).split(1 << 22):
        values = part.cpu().double()
        finite = values[values.isfinite()]
        if finite.numel() and finite.min() < 0:
            raise UnsupportedInput(
                f"norms must be 0 or more; got {finite.min().item():.4g}. Pass norms of tokens, not features"
            )
        not_finite += values.numel() - finite.numel()
        counts += torch.bincount(bins_of(finite), minlength=NUM_BINS).numpy()
    return counts, not_finite


def bins_of(norms: Tensor) -> Tensor:
    """Return the bin of each norm; all finite and on the CPU."""
    return torch.bucketize(norms.double(), torch.from_numpy(EDGES[1:-1]))


def count_above(counts: Counts, edge: float | None) -> int:
    """Return how many norms are above an edge of the bins; 0 without one."""
    return 0 if edge is None else int(counts[int(np.searchsorted(EDGES, edge)) :].sum())


def quantile(counts: Counts, q: float) -> float:
    """Return a quantile, interpolated within its bin; NaN for an empty histogram."""
    total = int(counts.sum())
    if not total:
        return math.nan
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    rank = min(max(q * total, 0.5), total - 0.5)
    index = min(int(np.searchsorted(cumulative, rank, side="left")), NUM_BINS) - 1
    inside = (rank - cumulative[index]) / counts[index]
    return float(EDGES[index] * (EDGES[index + 1] / EDGES[index]) ** inside)
