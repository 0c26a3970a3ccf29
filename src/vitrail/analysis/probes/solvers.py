"""The mathematics under the linear solver: one logistic fit, one ridge fit, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitrail.analysis.probes.inputs import CHUNK


def minimise(
    x: Tensor, y: Tensor, start: Tensor, penalty: float, max_iter: int, tolerance: float
) -> tuple[Tensor, bool]:
    """Minimise the loss from a start (D+1, C), biases last, and say whether the minimum was reached."""
    params = torch.nn.Parameter(start.clone(), requires_grad=True)
    solver = torch.optim.LBFGS(
        [params],
        max_iter=max_iter,
        max_eval=4 * max_iter,
        tolerance_grad=tolerance,
        tolerance_change=tolerance**2,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def closure() -> Tensor:
        loss, params.grad = logistic_loss(x, y, params.detach(), penalty)
        return loss

    solver.step(closure)
    state = solver.state[params]
    return params.detach(), state["n_iter"] < max_iter and state["func_evals"] < 4 * max_iter


def logistic_loss(x: Tensor, y: Tensor, params: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Penalised mean of −log p and its gradient, in pieces and written out: nothing is kept for a backward pass."""
    weight, bias = params[:-1], params[-1]
    gradient = torch.zeros_like(params)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in slices(len(x), max(weight.shape)):
        log = torch.addmm(bias, x[part], weight).log_softmax(1)
        true = torch.arange(len(log), device=x.device), y[part]
        total -= log[true].double().sum()
        slope = log.exp_()
        slope[true] -= 1
        gradient[:-1].addmm_(x[part].T, slope)
        gradient[-1] += slope.sum(0)
    gradient /= len(x)
    gradient[:-1] += penalty * weight
    return total / len(x) + penalty / 2 * weight.double().square().sum(), gradient


def solve_ridge(x: Tensor, y: Tensor, grid: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights (D, K) and bias (K,) for each penalty, from one eigendecomposition."""
    count, width = x.shape
    mean_x, mean_y = x.mean(0, dtype=torch.float64), y.mean(0, dtype=torch.float64)
    gram = torch.zeros(width, width, dtype=torch.float64, device=x.device)
    cross = torch.zeros(width, y.shape[1], dtype=torch.float64, device=x.device)
    for part in slices(count, max(width, y.shape[1])):
        centred = x[part].double() - mean_x
        gram.addmm_(centred.T, centred)
        cross.addmm_(centred.T, y[part].double() - mean_y)
    values, vectors = torch.linalg.eigh(gram / count)
    turned = vectors.T @ (cross / count)
    floor = 1e-10 * float(values[-1].clamp_min(1e-30))
    for penalty in grid:
        inverse = torch.where(values > floor, 1 / (values.clamp_min(floor) + penalty), 0.0)
        weight = vectors @ (inverse[:, None] * turned)
        yield weight.to(x.dtype), (mean_y - mean_x @ weight).to(x.dtype)


def rows_at_once(width: int) -> int:
    """How many rows of that width are worked on at a time."""
    return max(1, CHUNK // width)


def slices(count: int, width: int, start: int = 0) -> Iterator[slice]:
    """Cut rows into pieces."""
    step = rows_at_once(width)
    return (slice(first, min(first + step, count)) for first in range(start, count, step))
