"""The linear solver of every probe: multinomial logistic regression and ridge regression, in torch.

It runs where the features are, in float32 (float64 for float64 features), and gives the same result each time on the
same device. Features are standardised by the mean and deviation of the training rows. The penalty is chosen on a slice
of the training pictures that is held out for that, and the model is then fitted to all training rows.

A penalty is the factor λ of ``mean loss + λ/2 · ‖W‖²`` for classifiers, and of ``mean squared error + λ · ‖W‖²`` for
regressors; biases are free. In scikit-learn's terms, with n rows: ``C = 1 / (λ n)`` (for two classes, where it keeps
one vector of weights instead of two, ``C = 2 / (λ n)``) and ``alpha = λ n``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import Array, as_features, as_whole, check_count
from vitrail.analysis.probes.solvers import logistic_loss, minimise, rows_at_once, slices, solve_ridge
from vitrail.analysis.statistics import hold_out
from vitrail.errors import InvalidOption, UnsupportedInput

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Penalties that a classifier chooses from."""

ENOUGH = 0.005
"""A weaker penalty must lower the held-out loss (natural logarithm) by this much, or the search ends."""

RIDGE_PENALTIES = (1e2, 1e1, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Penalties that a regressor chooses from."""


@dataclass(frozen=True)
class Scaling:
    """Shift and scale (D,) that give each channel of the training rows mean 0 and deviation 1.

    A channel that does not vary becomes 0 everywhere.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, features: Tensor, dtype: torch.dtype) -> Scaling:
        """Learn from features (n, D); sums are kept in float64."""
        count = len(features)
        parts = features.split(rows_at_once(features.shape[1]))
        total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
        for part in parts:
            total += part.double().sum(0)
        mean = total / count
        square = torch.zeros_like(mean)
        for part in parts:
            square += (part.double() - mean).square().sum(0)
        deviation = (square / count).sqrt()
        still = deviation <= 1e-9 * mean.abs().clamp_min(1e-30)
        return cls(mean.to(dtype), torch.where(still, 0.0, 1 / deviation.masked_fill(still, 1.0)).to(dtype))

    def __call__(self, features: Tensor) -> Tensor:
        """Standardise features (n, D)."""
        return (features.to(self.mean) - self.mean) * self.scale


@dataclass(frozen=True)
class LinearMap:
    """Standardisation, then weights (D, K) and biases (K,)."""

    scaling: Scaling
    weight: Tensor
    bias: Tensor
    penalty: float

    def scores(self, features: Tensor) -> Tensor:
        """Map features (..., D) to scores (..., K), piece by piece."""
        rows = features.reshape(-1, features.shape[-1])
        out = torch.empty(len(rows), len(self.bias), dtype=self.bias.dtype, device=self.bias.device)
        for part in slices(len(rows), max(self.weight.shape)):
            out[part] = torch.addmm(self.bias, self.scaling(rows[part]), self.weight)
        return out.reshape(*features.shape[:-1], -1)


@dataclass(frozen=True)
class LinearClassifier(LinearMap):
    """A fitted classifier.

    Attributes:
        classes: (K,) label of each column of the scores, in rising order.
        converged: whether the solver came to rest before its steps ran out.
    """

    classes: Tensor
    converged: bool

    def predict(self, features: Tensor) -> Tensor:
        """Give the likeliest label of each row (n, D), without ever holding all scores."""
        parts = features.split(rows_at_once(max(self.weight.shape)))
        return self.classes[torch.cat([self.scores(part).argmax(-1) for part in parts])]


@dataclass(frozen=True)
class LinearRegressor(LinearMap):
    """A fitted regressor; its scores are the predictions."""


@torch.no_grad()
def fit_classifier(
    features: Array,
    labels: Array,
    *,
    groups: Array | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
    max_iter: int = 100,
    tolerance: float = 1e-4,
) -> LinearClassifier:
    """Fit multinomial logistic regression by L-BFGS.

    The penalty is walked from strong to weak, each fit starting from the last, and the walk ends where the loss on
    the held-out slice no longer falls. With fewer than ten groups there is nothing to choose with, and the middle
    penalty is taken.

    Args:
        features: (n, D), finite, in any precision.
        labels: (n,) whole numbers; any, in any order.
        groups: (n,) the picture that each row comes from; by default each row is a picture of its own.
        penalties: what to choose from; a single one is taken as it is.
        seed: of the slice that is held out.
        max_iter: most steps of one fit.
        tolerance: the solver rests where no entry of the gradient is larger.
    """
    grid = sorted(_check_penalties(penalties), reverse=True)
    check_count(max_iter, "max_iter")
    rows, group = _check_rows(features, groups)
    classes, target = as_whole(labels, "labels", "n").to(rows.device).unique(return_inverse=True)
    if len(target) != len(rows):
        raise UnsupportedInput(f"there are {len(target)} labels for {len(rows)} rows of features; give one for each")
    if len(classes) < 2:
        raise UnsupportedInput(
            f"all {len(target)} labels are {int(classes[0])}; a classifier needs two or more classes"
        )
    held = hold_out(group, seed=seed) if len(grid) > 1 else None
    scaling, x, order, kept = _prepare(rows, held)
    y = target[order]
    params = torch.zeros(x.shape[1] + 1, len(classes), dtype=x.dtype, device=x.device)
    penalty = grid[len(grid) // 2]
    if held is not None:
        params, penalty = _walk(x, y, kept, params, grid, max_iter, tolerance)
    params, converged = minimise(x, y, params, penalty, max_iter, tolerance)
    return LinearClassifier(scaling, params[:-1], params[-1], penalty, classes, converged)


@torch.no_grad()
def fit_regressor(
    features: Array,
    targets: Array,
    *,
    groups: Array | None = None,
    penalties: Sequence[float] = RIDGE_PENALTIES,
    seed: int = 0,
) -> LinearRegressor:
    """Fit ridge regression from features (n, D) to targets (n, K) in closed form, with sums in float64.

    The penalty is the one of the least squared error on the held-out slice, all targets together. A penalty of 0 is
    plain linear regression; directions that the features do not have then get weight 0.
    """
    grid = sorted(_check_penalties(penalties), reverse=True)
    rows, group = _check_rows(features, groups)
    goal = as_features(targets, "targets", "n K").to(rows.device)
    if len(goal) != len(rows):
        raise UnsupportedInput(f"there are {len(goal)} targets for {len(rows)} rows of features; give one for each")
    held = hold_out(group, seed=seed) if len(grid) > 1 else None
    scaling, x, order, kept = _prepare(rows, held)
    y = goal[order].to(x.dtype)
    penalty = grid[len(grid) // 2]
    if held is not None:
        errors = []
        for weight, bias in solve_ridge(x[:kept], y[:kept], grid):
            parts = ((x[part] @ weight + bias - y[part]) for part in slices(len(x), max(weight.shape), start=kept))
            errors.append(sum(float(part.double().square().sum()) for part in parts))
        penalty = grid[errors.index(min(errors))]
    weight, bias = next(solve_ridge(x, y, [penalty]))
    return LinearRegressor(scaling, weight, bias, penalty)


def _prepare(rows: Tensor, held: Tensor | None) -> tuple[Scaling, Tensor, Tensor, int]:
    """Standardise the rows and put the held-out ones last, so that both parts are views of one tensor."""
    order = torch.arange(len(rows)) if held is None else held.int().argsort(stable=True)
    kept = len(rows) if held is None else int((~held).sum())
    order = order.to(rows.device)
    scaling = Scaling.of(rows, torch.float64 if rows.dtype == torch.float64 else torch.float32)
    x = torch.empty(rows.shape, dtype=scaling.mean.dtype, device=rows.device)
    for part in slices(len(rows), rows.shape[1]):
        x[part] = scaling(rows[order[part]])
    return scaling, x, order, kept


def _walk(
    x: Tensor, y: Tensor, kept: int, params: Tensor, grid: list[float], max_iter: int, tolerance: float
) -> tuple[Tensor, float]:
    """Choose the penalty on the rows from ``kept`` on; give the parameters fitted with it, too.

    Held-out rows of a class that no other row has say nothing about the penalty, and are passed over.
    """
    known = torch.zeros(params.shape[1], dtype=torch.bool, device=x.device)
    known[y[:kept]] = True
    judged = known[y[kept:]].nonzero()[:, 0] + kept
    held_x, held_y = x[judged], y[judged]
    best, least, chosen = params, math.inf, grid[len(grid) // 2]
    for penalty in grid if len(judged) else ():
        params, _ = minimise(x[:kept], y[:kept], params, penalty, max_iter, tolerance)
        loss, _ = logistic_loss(held_x, held_y, params, 0.0)
        if not float(loss) < least - ENOUGH:
            break
        best, least, chosen = params, float(loss), penalty
    return best, chosen


def _check_rows(features: Array, groups: Array | None) -> tuple[Tensor, Tensor]:
    """Take features and the picture of each row; without float64, as on Apple's GPUs, the work is done on the CPU."""
    rows = as_features(features, "features", "n D")
    if rows.device.type == "mps":
        rows = rows.cpu()
    group = torch.arange(len(rows)) if groups is None else as_whole(groups, "groups", "n")
    if len(group) != len(rows):
        raise UnsupportedInput(f"there are {len(group)} groups for {len(rows)} rows of features; give one for each")
    return rows, group


def _check_penalties(penalties: Sequence[float]) -> list[float]:
    """Refuse an empty grid, and penalties that are no such thing."""
    grid = [float(penalty) for penalty in penalties]
    if not grid or not all(0 <= penalty < math.inf for penalty in grid):
        raise InvalidOption(f"penalties are one or more finite numbers, 0 or more; got {list(penalties)}")
    return grid
