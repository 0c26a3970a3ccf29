"""Measurements of stability while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found, find
from vitrail.analysis.residuals import measure_residuals
from vitrail.errors import UnsupportedModel
from vitrail.training.evaluation.diagnostics import autocast
from vitrail.training.objective.objective import Terms

KIND = "stability"
"""Kind of the lines in the log."""

IMAGES = 16
"""Samples of a batch on which residual norms are measured."""


class Monitor:
    """Loss and gradient norms of every step, and residual norms at the end of each interval.

    Norms stay on the device until an interval ends, so that steps do not wait for them. `record_gradients` writes to a
    fixed place, which a captured CUDA graph can hold.

    Attributes:
        note: why residual norms cannot be measured; None where they can.
    """

    def __init__(self, model: nn.Module, learner: nn.Module, device: torch.device) -> None:
        self._model = model
        self.note: str | None = None
        try:
            found: Found | None = find(model)
        except UnsupportedModel as error:
            found, self.note = None, f"gradients of all layers together only, as {error}"
        layers = [] if found is None else [*found.blocks, *found.adapter.stage(found.trunk)]
        self._groups = list(_parameters_by_layer(learner, layers))
        self._gradients = torch.zeros(len(self._groups) + 1, device=device)
        self._rows: list[Tensor] = []

    @property
    def started(self) -> bool:
        """Whether an interval has begun."""
        return bool(self._rows)

    @torch.no_grad()
    def record_gradients(self) -> None:
        """Store the norm of all gradients, and those of each layer and of everything else. Called after backward."""
        squares = []
        for group in self._groups:
            gradients = [one.grad for one in group if one.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients)).float() if gradients else self._gradients.new_zeros(1)
            squares.append(norms.square().sum())
        by_layer = torch.stack(squares)
        self._gradients.copy_(torch.cat([by_layer.sum()[None], by_layer]).sqrt())

    @torch.no_grad()
    def add(self, terms: Sequence[Terms]) -> None:
        """Store the loss of a step, the mean over its parts, beside its gradients."""
        loss = torch.stack([one.total.float() for one in terms]).mean()
        self._rows.append(torch.cat([loss[None], self._gradients]))

    def take(
        self, inputs: Tensor | None, reduce: Callable[[Tensor], object], ranks: int, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Return the values of an interval for the log, and begin the next one; ``reduce`` sums over ranks.

        Residual norms are measured on the first of the inputs, and left out without inputs.
        """
        rows = torch.stack(self._rows)
        self._rows = []
        losses = rows[:, 0].clone()
        reduce(losses)
        _, total, *layers, others = rows.T
        by_layer = torch.stack(layers) if layers else rows.new_zeros(0, len(rows))
        return {
            "loss": (losses / ranks).tolist(),
            "gradient": total.tolist(),
            "layers": {
                "gradient": by_layer.mean(1).tolist(),
                "largest_gradient": by_layer.amax(1).tolist(),
                **self._residuals(inputs, dtype),
            },
            "other_gradient": float(others.mean()),
        }

    def _residuals(self, inputs: Tensor | None, dtype: torch.dtype | None) -> dict[str, Any]:
        if self.note is not None or inputs is None:
            return {}
        try:
            with autocast(inputs.device, dtype):
                return measure_residuals(self._model, inputs[:IMAGES]).to_dict()
        except UnsupportedModel as error:
            self.note = f"no residual norms, as {error}"
            return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the steps of an unfinished interval, for a checkpoint."""
        return {"rows": torch.stack(self._rows).tolist() if self._rows else []}

    def restore(self, values: dict[str, Any]) -> None:
        self._rows = (
            list(torch.tensor(values["rows"], device=self._gradients.device).unbind()) if values["rows"] else []
        )


def _parameters_by_layer(learner: nn.Module, layers: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each layer, and at last all others."""
    seen: set[nn.Parameter] = set()
    for layer in layers:
        own = [one for one in layer.parameters() if one not in seen]
        seen.update(own)
        yield own
    yield [one for one in learner.parameters() if one not in seen]
