"""Splits of images, and confidence intervals over images.

The unit is always the image. Tokens of one image resemble each other: if some of them trained a probe and others
tested it, or if each counted as an independent trial, results would look better and more certain than they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail._wording import counted
from vitrail.analysis._inputs import Array, check_count, check_share
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput

LEVEL = 0.95
"""Level of all confidence intervals."""

Interval = tuple[float, float]
Statistic = Callable[[Tensor], Tensor]
"""From sums over images (R, K) to one number per row (R,)."""


class Estimate(Result):
    """Mean and standard deviation over seeds (None with one), and the 95 % confidence interval over images.

    ``low`` and ``high`` are None if there are too few images.
    """

    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], interval: Interval | None) -> Estimate:
        """Summarize one value per seed, with an interval over images."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, *(interval or (None, None)))


@dataclass(frozen=True)
class Split:
    """Indices of training and test images; masks and lists are converted.

    >>> Split([True, True, False], [False, False, True]).test
    tensor([2])
    """

    train: Tensor
    test: Tensor

    def __init__(self, train: Array | Sequence[int] | Sequence[bool], test: Array | Sequence[int] | Sequence[bool]):
        for name, given in (("train", train), ("test", test)):
            part = torch.as_tensor(given).cpu()
            if part.dtype == torch.bool:
                part = part.nonzero()[:, 0]
            if part.ndim != 1 or not len(part) or part.is_floating_point() or int(part.min()) < 0:
                raise InvalidOption(f"{name} must be image indices or a mask, not empty; got {given!r}")
            object.__setattr__(self, name, part.long())
        twice = len(self.train) + len(self.test) - len(torch.cat([self.train, self.test]).unique())
        if twice:
            raise InvalidOption(
                f"{counted(twice, 'image')} {'is' if twice == 1 else 'are'} in the split twice; expected each in train "
                "or test, once"
            )

    def check(self, count: int) -> None:
        """Raise if an index is out of range for ``count`` images."""
        last = max(int(self.train.max()), int(self.test.max()))
        if last >= count:
            raise InvalidOption(f"the split has index {last}, but there are {count} images, counted from 0")


@fitting
def split_images(count: int, *, test_share: float = 0.3, seed: int = 0, labels: Tensor | None = None) -> Split:
    """Split images at random; with labels, each class separately.

    Each class of two or more images is then in both parts; a class of one image is in the training part.
    """
    check_count(count, "the number of images", least=2)
    check_share(test_share, "test_share")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if labels is None:
        parts = [order]
    else:
        values = labels.cpu()[order]
        sizes = values.unique(return_counts=True)[1].tolist()
        parts = list(order[values.argsort(stable=True)].split(sizes))
    train, test = [], []
    for part in parts:
        cut = min(max(round(test_share * len(part)), 1), len(part) - 1)
        test.append(part[:cut])
        train.append(part[cut:])
    if not any(map(len, test)):
        raise UnsupportedInput(f"none of the classes of {count} images has two images, one to train and one to test")
    return Split(torch.cat(train).sort().values, torch.cat(test).sort().values)


@fitting
def hold_out(groups: Tensor, *, seed: int = 0) -> Tensor | None:
    """Return a mask (n,) of the rows of a random fifth of the groups; None for fewer than ten groups."""
    names, group = groups.cpu().unique(return_inverse=True)
    if len(names) < 10:
        return None
    chosen = torch.zeros(len(names), dtype=torch.bool)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    chosen[order[: round(0.2 * len(names))]] = True
    return chosen[group]


@fitting
def subsample(rows: Tensor, most: int, seed: int) -> Tensor:
    """Return at most ``most`` random rows (n, ...), in their order."""
    if len(rows) <= most:
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    return rows[chosen.to(rows.device)]


@fitting
def wilson(successes: float, trials: int) -> Interval | None:
    """Return Wilson's interval for a share of independent trials (images, not tokens); None without a trial.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if trials < 1:
        return None
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    share = successes / trials
    scale = 1 / (1 + z * z / trials)
    center = (share + z * z / (2 * trials)) * scale
    half = z * scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends, rounding must not put the share outside of its own interval.
    return min(share, max(0.0, center - half)), max(share, min(1.0, center + half))


@fitting
def ratio(top: int, bottom: int) -> Statistic:
    """Return the statistic that divides one column of the sums by another."""
    return lambda sums: sums[:, top] / sums[:, bottom]


@fitting
def bootstrap(sums: Tensor, statistic: Statistic, *, resamples: int = 1000, seed: int = 0) -> Interval | None:
    """Return the percentile interval of a statistic of sums, from images drawn with replacement.

    A draw is a matrix product over per-image sums, which takes far less time than resampling tokens.

    Args:
        sums: (G, K) what each image adds, such as its errors and its number of tokens.
        statistic: from totals (R, K) to numbers (R,); NaN where a draw allows none.
        resamples, seed: number and seed of the draws.

    Returns:
        Both ends, or None for fewer than two images.
    """
    count = len(sums)
    if count < 2:
        return None
    sums = sums.detach().cpu().double()
    generator = torch.Generator().manual_seed(seed)
    values = []
    for start in range(0, resamples, step := max(1, 2**22 // count)):
        drawn = torch.randint(count, (min(step, resamples - start), count), generator=generator)
        times = torch.zeros(drawn.shape, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(times))
        values.append(statistic(times @ sums))
    found = torch.cat(values)
    found = found[~found.isnan()]
    if not len(found):
        return None
    low, high = found.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high


@fitting
def ratio_of_medians(above: Sequence[float], below: Sequence[float], *, resamples: int = 1000) -> Interval | None:
    """Return the percentile interval of the ratio of two medians, from pairs drawn with replacement.

    For interleaved timings: one pair per round, so that load on the machine affects both. None for fewer than two.
    """
    if len(above) < 2:
        return None
    pairs = torch.tensor([list(above), list(below)], dtype=torch.float64)
    drawn = torch.randint(len(above), (resamples, len(above)), generator=torch.Generator().manual_seed(0))
    top, bottom = pairs[:, drawn].quantile(0.5, dim=2)
    low, high = (top / bottom).quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high
