"""Linear probes: multinomial logistic regression and ridge regression, in torch.

They run on the device of the features, in chunks, and give the same result each time on the same device, which is why
scikit-learn is only their oracle. Features are in float32 (float64 for float64 features), losses and gradients in
float64. Features are standardized by the training rows. The penalty is chosen on a held-out part of the training
images, then the model is fitted to all training rows.

A penalty is the factor λ of ``mean loss + λ/2 · ‖W‖²`` for classifiers, and of ``mean squared error + λ · ‖W‖²`` for
regressors; biases are free. In scikit-learn's terms, with n rows: ``C = 1 / (λ n)`` (for two classes, where it keeps
one weight vector instead of two, ``C = 2 / (λ n)``) and ``alpha = λ n``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import Array, as_features, as_integers, chunks, map_chunks
from vitrail.analysis.statistics import hold_out
from vitrail.errors import InvalidOption, UnsupportedInput

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Penalties that a classifier chooses from."""

MIN_GAIN = 0.005
"""A weaker penalty must lower the held-out loss (natural logarithm) by this much, or the search ends."""

MAX_STEPS, MAX_PRODUCTS = 50, 300
"""A fit ends after so many Newton steps; each takes at most so many products with the Hessian."""

TOLERANCE = 1e-4
"""A fit has converged when the next Newton step would change the scores by less: as root mean square over rows,
weighted by how uncertain the predictions are. Unlike a bound on the gradient, this means the same for every penalty."""

FORCING = 0.1
"""Newton steps are solved until the residual has fallen to this share of the gradient, and more closely near the
minimum."""

RIDGE_PENALTIES = (1e2, 1e1, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Penalties that a regressor chooses from."""


@dataclass(frozen=True)
class Scaling:
    """Mean and inverse standard deviation (D,) of the training rows; channels that do not vary become 0."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, features: Tensor, dtype: torch.dtype) -> Scaling:
        """Fit to features (n, D), with sums in float64."""
        parts = [features[part] for part in chunks(*features.shape)]
        mean = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
        for part in parts:
            mean += part.double().sum(0)
        mean /= len(features)
        square = torch.zeros_like(mean)
        for part in parts:
            square += (part.double() - mean).square().sum(0)
        deviation = (square / len(features)).sqrt()
        still = deviation <= 1e-9 * mean.abs().clamp_min(1e-30)
        return cls(mean.to(dtype), torch.where(still, 0.0, 1 / deviation.masked_fill(still, 1.0)).to(dtype))

    def __call__(self, features: Tensor) -> Tensor:
        """Standardize features (n, D)."""
        return (features.to(self.mean) - self.mean) * self.scale


@dataclass(frozen=True)
class LinearMap:
    """Standardization, then weights (D, K) and biases (K,)."""

    scaling: Scaling
    weight: Tensor
    bias: Tensor
    penalty: float

    def scores(self, features: Tensor) -> Tensor:
        """Map features (..., D) to scores (..., K)."""
        rows = features.reshape(-1, features.shape[-1])
        scores = map_chunks(self._scores, rows, max(self.weight.shape))
        return scores.reshape(*features.shape[:-1], -1)

    def _scores(self, rows: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.scaling(rows), self.weight)


@dataclass(frozen=True)
class LinearClassifier(LinearMap):
    """A fitted classifier: the label of each column of the scores (K,), and whether the solver converged."""

    classes: Tensor
    converged: bool

    def predict(self, features: Tensor) -> Tensor:
        """Return the most likely label of each row (n, D), without holding all scores."""
        best = map_chunks(lambda rows: self._scores(rows).argmax(-1), features, max(self.weight.shape))
        return self.classes[best]


@dataclass(frozen=True)
class LinearRegressor(LinearMap):
    """A fitted regressor; its scores are the predictions."""


@fitting
@torch.no_grad()
def fit_classifier(
    features: Array,
    labels: Array,
    *,
    groups: Array | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> LinearClassifier:
    """Fit multinomial logistic regression by Newton's method, to the minimum for every penalty.

    Penalties are tried from strong to weak, each fit starting from the last, until the held-out loss no longer
    falls. With fewer than ten groups nothing can be held out, and the middle penalty is used.

    Args:
        features: (n, D), finite, in any precision.
        labels: (n,) any integers.
        groups: (n,) the image of each row; by default each row is an image of its own.
        penalties: penalties to choose from; a single one is used as is.
        seed: seed of the held-out part.
    """
    rows = _as_rows(features)
    classes, target = as_integers(labels, "labels", str(len(rows))).to(rows.device).unique(return_inverse=True)
    if len(classes) < 2:
        raise UnsupportedInput(
            f"all {len(target)} labels are {int(classes[0])}; a classifier needs two or more classes"
        )
    scaling, x, y, kept, grid = _prepare(rows, target, groups, penalties, seed)
    params = torch.zeros(x.shape[1] + 1, len(classes), dtype=x.dtype, device=x.device)
    penalty = grid[len(grid) // 2]
    if kept < len(x):
        params, penalty = _search_penalty(x, y, kept, params, grid)
    params, converged = _minimize(x, y, params, penalty)
    return LinearClassifier(scaling, params[:-1], params[-1], penalty, classes, converged)


@fitting
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

    The penalty with the least squared error on the held-out part is chosen, for all targets together. A penalty of 0
    is plain linear regression; directions that the features do not span get weight 0.
    """
    rows = _as_rows(features)
    goal = as_features(targets, "targets", f"{len(rows)} K").to(rows.device)
    scaling, x, y, kept, grid = _prepare(rows, goal, groups, penalties, seed)
    y = y.to(x.dtype)
    penalty = grid[len(grid) // 2]
    if kept < len(x):
        errors = []
        for weight, bias in _solve_ridge(x[:kept], y[:kept], grid):
            parts = ((x[part] @ weight + bias - y[part]) for part in chunks(len(x), max(weight.shape), start=kept))
            errors.append(sum(float(part.double().square().sum()) for part in parts))
        penalty = grid[errors.index(min(errors))]
    weight, bias = next(_solve_ridge(x, y, [penalty]))
    return LinearRegressor(scaling, weight, bias, penalty)


def _prepare(
    rows: Tensor, targets: Tensor, groups: Array | None, penalties: Sequence[float], seed: int
) -> tuple[Scaling, Tensor, Tensor, int, list[float]]:
    """Standardize the rows, and put held-out ones last, so that both parts are views of one tensor.

    Returns:
        The standardization, rows and targets, how many rows are not held out, and the penalties from strong to weak.
    """
    grid = sorted((float(penalty) for penalty in penalties), reverse=True)
    if not grid or not all(0 <= penalty < math.inf for penalty in grid):
        raise InvalidOption(f"penalties must be one or more finite numbers, 0 or more; got {list(penalties)}")
    group = torch.arange(len(rows)) if groups is None else as_integers(groups, "groups", str(len(rows)))
    held = hold_out(group, seed=seed) if len(grid) > 1 else None
    held = torch.zeros(len(rows), dtype=torch.bool) if held is None else held
    order = held.int().argsort(stable=True).to(rows.device)
    scaling = Scaling.of(rows, torch.promote_types(rows.dtype, torch.float32))
    x = map_chunks(lambda part: scaling(rows[part]), order, rows.shape[1])
    return scaling, x, targets[order], int((~held).sum()), grid


def _search_penalty(x: Tensor, y: Tensor, kept: int, params: Tensor, grid: list[float]) -> tuple[Tensor, float]:
    """Choose the penalty on the rows from ``kept`` on; return it with the parameters fitted with it.

    Held-out rows of a class that no other row has are ignored.
    """
    known = torch.zeros(params.shape[1], dtype=torch.bool, device=x.device)
    known[y[:kept]] = True
    judged = known[y[kept:]].nonzero()[:, 0] + kept
    held_x, held_y = x[judged], y[judged]
    best, least, chosen = params, math.inf, grid[len(grid) // 2]
    for penalty in grid if len(judged) else ():
        params, _ = _minimize(x[:kept], y[:kept], params, penalty)
        loss, *_ = _logistic_loss(held_x, held_y, params.double(), 0.0)
        if not float(loss) < least - MIN_GAIN:
            break
        best, least, chosen = params, float(loss), penalty
    return best, chosen


@dataclass(frozen=True)
class _Spectrum:
    """Eigenvectors (D, D) and eigenvalues (D,) of the second moment of the rows, to precondition Newton steps."""

    vectors: Tensor
    values: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Spectrum:
        gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        for part in chunks(*x.shape):
            rows = x[part].double()
            gram.addmm_(rows.T, rows)
        values, vectors = torch.linalg.eigh(gram / len(x))
        return cls(vectors, values.clamp_min(0))

    def solve(self, gradient: Tensor, curvature: float, penalty: float) -> Tensor:
        """Return the gradient (D+1, C) divided by an average of the Hessian."""
        scale = curvature * self.values + penalty + 1e-12
        weight = self.vectors @ ((self.vectors.T @ gradient[:-1]) / scale[:, None])
        return torch.cat([weight, gradient[-1:] / (curvature + 1e-12)])


def _minimize(x: Tensor, y: Tensor, start: Tensor, penalty: float) -> tuple[Tensor, bool]:
    """Minimize the loss from parameters (D+1, C), biases last; return the minimum, and whether the solver converged.

    Newton's method: each step is solved by preconditioned conjugate gradients, and shortened until the loss falls
    enough. The squared size of a step in the metric of the Hessian is the mean square change of the scores, and it
    ends the search."""
    spectrum, params = _Spectrum.of(x), start.double()
    loss, gradient, curvature = _logistic_loss(x, y, params, penalty)
    for _ in range(MAX_STEPS):
        step, decrement = _newton_step(x, params, gradient, spectrum, curvature, penalty)
        if decrement <= TOLERANCE**2:
            return params.to(start.dtype), True
        length = 1.0
        while length > 1e-6:
            ahead = _logistic_loss(x, y, params + length * step, penalty)
            if float(ahead[0]) <= float(loss) - 1e-4 * length * decrement:
                break
            length /= 2
        else:
            break
        params, (loss, gradient, curvature) = params + length * step, ahead
    return params.to(start.dtype), False


def _newton_step(
    x: Tensor, params: Tensor, gradient: Tensor, spectrum: _Spectrum, curvature: float, penalty: float
) -> tuple[Tensor, float]:
    """Return a step (D+1, C) and its square in the metric of the Hessian: the decrease expected from it."""
    step, residual = torch.zeros_like(gradient), -gradient
    direction = spectrum.solve(residual, curvature, penalty)
    size = first = float((residual * direction).sum())
    goal = min(FORCING, math.sqrt(first)) ** 2 * first
    for _ in range(MAX_PRODUCTS):
        if size <= goal or size <= 0:
            break
        product = _hessian_product(x, params, direction, penalty)
        length = size / float((direction * product).sum())
        step += length * direction
        residual -= length * product
        solved = spectrum.solve(residual, curvature, penalty)
        size, last = float((residual * solved).sum()), size
        direction = solved + (size / last) * direction
    return step, -float((gradient * step).sum())


def _logistic_loss(x: Tensor, y: Tensor, params: Tensor, penalty: float) -> tuple[Tensor, Tensor, float]:
    """Return the penalized mean of −log p, its gradient, and the mean of p (1 − p); in float64, in chunks."""
    weight, bias = params[:-1], params[-1]
    gradient = torch.zeros_like(params)
    total, spread = torch.zeros((2,), dtype=torch.float64, device=x.device)
    for part in chunks(len(x), max(weight.shape)):
        rows = x[part].double()
        log = torch.addmm(bias, rows, weight).log_softmax(1)
        true = torch.arange(len(log), device=x.device), y[part]
        total -= log[true].sum()
        slope = log.exp_()
        spread += (slope * (1 - slope)).sum()
        slope[true] -= 1
        gradient[:-1].addmm_(rows.T, slope)
        gradient[-1] += slope.sum(0)
    gradient /= len(x)
    gradient[:-1] += penalty * weight
    return total / len(x) + penalty / 2 * weight.square().sum(), gradient, float(spread) / (len(x) * len(bias))


def _hessian_product(x: Tensor, params: Tensor, direction: Tensor, penalty: float) -> Tensor:
    """Return the Hessian of the loss times a direction (D+1, C); products of rows are in the precision of the rows."""
    weight, bias, along = params[:-1].to(x), params[-1].to(x), direction.to(x)
    product = torch.zeros_like(along)
    for part in chunks(len(x), max(weight.shape)):
        p = torch.addmm(bias, x[part], weight).softmax(1)
        change = torch.addmm(along[-1], x[part], along[:-1])
        change = p * (change - (p * change).sum(1, keepdim=True))
        product[:-1].addmm_(x[part].T, change)
        product[-1] += change.sum(0)
    result = product.double() / len(x)
    result[:-1] += penalty * direction[:-1]
    return result


def _solve_ridge(x: Tensor, y: Tensor, grid: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights (D, K) and bias (K,) for each penalty, from one eigendecomposition."""
    count, width = x.shape
    mean_x, mean_y = x.mean(0, dtype=torch.float64), y.mean(0, dtype=torch.float64)
    gram = torch.zeros(width, width, dtype=torch.float64, device=x.device)
    cross = torch.zeros(width, y.shape[1], dtype=torch.float64, device=x.device)
    for part in chunks(count, max(width, y.shape[1])):
        centered = x[part].double() - mean_x
        gram.addmm_(centered.T, centered)
        cross.addmm_(centered.T, y[part].double() - mean_y)
    values, vectors = torch.linalg.eigh(gram / count)
    rotated = vectors.T @ (cross / count)
    floor = 1e-10 * float(values[-1].clamp_min(1e-30))
    for penalty in grid:
        inverse = torch.where(values > floor, 1 / (values.clamp_min(floor) + penalty), 0.0)
        weight = vectors @ (inverse[:, None] * rotated)
        yield weight.to(x.dtype), (mean_y - mean_x @ weight).to(x.dtype)


def _as_rows(features: Array) -> Tensor:
    """Return features (n, D), on the CPU for devices without float64 (mps)."""
    rows = as_features(features, "features", "n D")
    return rows.cpu() if rows.device.type == "mps" else rows
