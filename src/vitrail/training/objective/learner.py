"""What one step of training computes: a model and its objective as one module, which DDP, FSDP and compile wrap."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from vitrail.training.bf16_weights import rounded
from vitrail.training.evaluation.outputs import answer, answer_with_map
from vitrail.training.objective.objective import Objective, Terms
from vitrail.training.objective.teacher import Taught

__all__ = ["Learner", "Taught", "Terms", "answer"]


class Learner(nn.Module):
    """A model and its objective. The loop calls this module and nothing inside it, so that it can be wrapped.

    A learner is whatever has this ``forward``, ``after_step`` and ``no_weight_decay``: the self-supervised one has
    them too, and the same loop trains it.

    - ``model`` is what evaluation, averaging (EMA) and saving are about. Parameters of the objective (variances of
      tasks, a projector of features) are trained with it and kept in checkpoints, and not in the saved model.
    - To compile, use ``learner.compile()``; the model's own ``forward`` is not what runs here.

    Args:
        model: any classifier: ours, timm's, transformers', or a module that gives logits.
        objective: what it is to learn.
        rounds: whether the model computes with weights that are rounded to bfloat16 (see `rounded`).
    """

    def __init__(self, model: nn.Module, objective: Objective, rounds: bool = False) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.rounds = rounds
        apart: Any = getattr(model, "set_distilled_training", None)
        if objective.heads.distilled is not None and apart is not None:
            apart(True)  # timm's models then give both answers while they train

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        mixed: tuple[Tensor | None, Tensor | None] | None = None,
        taught: Taught | None = None,
    ) -> Terms:
        """Give the loss of a batch, in total and in parts.

        Args:
            images: prepared pictures (B, C, H, W).
            labels: (B, T), one column for each question.
            mixed: for mixed pictures, each one's partner in the batch and share of its own label, (B,) each.
            taught: what the teacher says about the same pictures.
        """
        features = None
        if self.rounds:
            images = images.bfloat16()
        with rounded(self.model) if self.rounds else nullcontext():
            if self.objective.wants_features:
                output, features = answer_with_map(self.model, images)
            else:
                output = answer(self.model, images)
        return self.objective(output, labels, mixed, taught, features)

    def after_step(self, progress: float) -> None:
        """Do what follows a step of the optimiser; ``progress`` is the share of training done. Here, nothing."""

    def no_weight_decay(self) -> set[str]:
        """Name the parameters that weight decay should leave alone, beside norms and biases."""
        named: Any = getattr(self.model, "no_weight_decay", set)
        ours = self.objective.no_weight_decay()
        return {f"model.{name}" for name in named()} | {f"objective.{name}" for name in ours}
