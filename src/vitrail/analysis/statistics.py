"""Splits of pictures, and how sure a number is that was measured on some of them.

The unit of everything here is the picture. Tokens of one picture resemble each other: if some of them trained a
probe and others tested it, or if each counted as an independent trial, the results would look better and surer
than they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import Array, check_count, check_share
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput

LEVEL = 0.95
"""Level of all confidence intervals."""

Interval = tuple[float, float]
Statistic = Callable[[Tensor], Tensor]
"""From sums over pictures (R, K) to one number per row (R,)."""


@dataclass(frozen=True)
class Estimate(Result):
    """A number measured with several seeds.

    Attributes:
        mean: mean over seeds.
        sd: standard deviation over seeds; None with one seed.
        low: lower end of the 95 % confidence interval for other pictures of the same kind; None where there are
            too few pictures for one.
        high: its upper end.
    """

    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], interval: Interval | None) -> Estimate:
        """Sum up one value per seed, with an interval that was computed over pictures."""
        low, high = interval if interval is not None else (None, None)
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, low, high)


@dataclass(frozen=True)
class Split:
    """Which pictures train and which test, as indices; masks and lists are taken, too.

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
                raise InvalidOption(f"{name} lists the pictures of that part by index, one or more; got {given!r}")
            object.__setattr__(self, name, part.long())
        twice = len(self.train) + len(self.test) - len(torch.cat([self.train, self.test]).unique())
        if twice:
            raise InvalidOption(f"{twice} pictures of the split are named twice; each trains or tests, once")

    def check(self, count: int) -> None:
        """Refuse a split that names pictures which are not there."""
        last = max(int(self.train.max()), int(self.test.max()))
        if last >= count:
            raise InvalidOption(f"the split names picture {last}, but there are {count}, counted from 0")


def split_pictures(count: int, *, test_share: float = 0.3, seed: int = 0, labels: Tensor | None = None) -> Split:
    """Split pictures at random; with labels, each class by itself.

    Each class of two pictures or more then has at least one on each side; a class of one picture trains.
    """
    check_count(count, "the number of pictures", least=2)
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
        raise UnsupportedInput(f"no class has two pictures among {count}, so that none can train and test it")
    return Split(torch.cat(train).sort().values, torch.cat(test).sort().values)


def hold_out(groups: Tensor, *, share: float = 0.2, least: int = 10, seed: int = 0) -> Tensor | None:
    """Mark the rows (n,) of a random share of the groups; None where there are fewer than ``least`` groups."""
    names, group = groups.cpu().unique(return_inverse=True)
    if len(names) < least:
        return None
    chosen = torch.zeros(len(names), dtype=torch.bool)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    chosen[order[: max(1, round(share * len(names)))]] = True
    return chosen[group]


def pick(rows: Tensor, most: int, seed: int) -> Tensor:
    """Take at most that many rows (n, ...) at random, in their order."""
    if len(rows) <= most:
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    return rows[chosen.to(rows.device)]


def wilson(successes: float, trials: int, level: float = LEVEL) -> Interval | None:
    """Wilson's interval for a share of independent trials: pictures, not tokens. None without a trial.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if trials < 1:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    scale = 1 / (1 + z * z / trials)
    centre = (share + z * z / (2 * trials)) * scale
    half = z * scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends, rounding must not put the share outside of its own interval.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def ratio(top: int, bottom: int) -> Statistic:
    """Give the statistic that divides one column of the sums by another."""
    return lambda sums: sums[:, top] / sums[:, bottom]


def bootstrap(
    sums: Tensor, statistic: Statistic, *, resamples: int = 1000, seed: int = 0, level: float = LEVEL
) -> Interval | None:
    """Percentile interval of a statistic of sums, from pictures drawn with replacement.

    Args:
        sums: (G, K) what each picture adds, such as its errors and its number of tokens.
        statistic: from totals (R, K) to numbers (R,); NaN where a draw allows none.

    Returns:
        Both ends, or None for fewer than two pictures.
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
    ends = found.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64))
    return float(ends[0]), float(ends[1])
