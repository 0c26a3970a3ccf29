"""The learner: a model and its objective as one module, which DDP, FSDP and torch.compile wrap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.training.evaluation.outputs import forward_output, forward_output_and_map
from vitrail.training.objective.objective import Mixed, Objective, Terms
from vitrail.training.objective.teacher import TeacherOutput


class Learner(nn.Module):
    """A model and its objective. The loop calls only this module, so that it can be wrapped.

    Any module with this ``forward`` and ``after_step`` can be trained; `SelfLearner` is another.

    ``model``, any classifier, is evaluated, averaged (EMA) and saved. Parameters of the objective (task variances, a
    feature projector) are trained and checkpointed with it, but not part of the saved model. With ``bf16_weights`` the
    model computes with weights cast to bfloat16.
    """

    def __init__(self, model: nn.Module, objective: Objective, bf16_weights: bool = False) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.bf16_weights = bf16_weights
        set_distilled: Any = getattr(model, "set_distilled_training", None)
        if objective.heads.distilled is not None and set_distilled is not None:
            set_distilled(True)  # timm's models then return both outputs during training

    def forward(
        self, images: Tensor, labels: Tensor, mixed: Mixed | None = None, taught: TeacherOutput | None = None
    ) -> Terms:
        """Return the loss of prepared images (B, C, H, W), given labels (B, T) and the teacher's output for them.

        ``mixed`` are the partner of each mixed image and the share of its own label, (B,) each.
        """
        x = images.bfloat16() if self.bf16_weights else images
        with cast_weights(self.model) if self.bf16_weights else nullcontext():
            both = self.objective.wants_features
            output, features = forward_output_and_map(self.model, x) if both else (forward_output(self.model, x), None)
        return self.objective(output, labels, mixed, taught, features)

    def after_step(self, progress: float) -> None:
        """Run after each optimizer step; ``progress`` is the fraction of training done. Does nothing here."""


@contextmanager
def cast_weights(model: nn.Module) -> Iterator[None]:
    """Cast a model's float32 weights to bfloat16 temporarily, with autocast off; gradients reach the float32 weights.

    Autocast casts the inputs of matrix products and keeps residual stream and norms in float32. In a narrow ViT these
    take more time than the products, and kernels for half precision do not apply. Here the whole model computes in
    bfloat16.

    Modules with floating-point buffers, such as batch norm, keep their weights: they compute in float32 and return the
    dtype of their input.
    """
    weights = [
        (part._parameters, name, weight)
        for part in model.modules()
        if not any(buffer is not None and buffer.is_floating_point() for buffer in part._buffers.values())
        for name, weight in part._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
    cast: dict[nn.Parameter, Tensor] = {}  # shared weights stay shared
    for parameters, name, weight in weights:
        if weight not in cast:
            cast[weight] = weight.bfloat16()
        parameters[name] = cast[weight]  # type: ignore[assignment]
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):  # it would run norms in float32
            yield
    finally:
        for parameters, name, weight in weights:
            parameters[name] = weight
