"""The objective: which head learns which target from labels or a teacher, and how the losses add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.labels.targets import Kind, TargetSpec
from vitrail.errors import InvalidOption
from vitrail.heads import Output
from vitrail.heads.pooling import linear
from vitrail.training.config.config import DISTILLATION_WEIGHTS, Config
from vitrail.training.evaluation.outputs import feature_width
from vitrail.training.objective.losses import (
    binary_cross_entropy,
    cross_entropy,
    feature_distillation,
    pixel_cross_entropy,
    pixel_squared_error,
    soft_distillation,
    squared_error,
)
from vitrail.training.objective.targets import Target, assign_targets, check_outputs, find_heads, required_outputs
from vitrail.training.objective.teacher import Teacher, TeacherOutput

LOSSES: dict[Kind, Callable[..., Tensor]] = {
    "classification": cross_entropy,
    "regression": squared_error,
    "multilabel": binary_cross_entropy,
    "dense": pixel_cross_entropy,
    "depth": pixel_squared_error,
}
"""Loss of a column by what it holds."""

Distillation = Literal["hard", "soft", "features"]
Mixed = tuple[Tensor, Tensor]


class Terms(NamedTuple):
    """The loss of a batch.

    Attributes:
        total: the loss to differentiate.
        parts: its terms, unweighted and detached: by head, ``distillation``, ``features``, ``task.NAME``.
    """

    total: Tensor
    parts: dict[str, Tensor]


def check_distillation(targets: Sequence[Target], distillation: str | None) -> None:
    """Raise if a teacher's classes cannot be learned, as columns hold none."""
    other = [target.name for target in targets if target.own and target.kind != "classification"]
    if distillation in ("hard", "soft") and other:
        raise InvalidOption(
            f"distillation={distillation!r} learns classes from a teacher, and {other[0]!r} holds none; use "
            "distillation='features'"
        )


class Objective(nn.Module):
    """The losses of a model with any heads.

    - Class heads (or pooled patches) and task heads learn from labels: classes by cross-entropy, several classes at
      once by binary cross-entropy, values, standardized, by the squared error, and masks by the cross-entropy of
      pixels; mixed images have both labels. The losses of several class heads are averaged.
    - The distillation head learns from the teacher, without label smoothing: its most likely class (``hard``) or its
      probabilities at a temperature (``soft``). Without that head, the class heads learn from the teacher too; without
      a teacher, that head learns from labels.
    - ``features`` compares a projection of the model's feature map with the teacher's, resized to the same grid. It is
      used alone, or in addition to ``hard`` and ``soft`` with ``feature_weight``.
    - The total is (1 − λ)·labels + λ·teacher + feature_weight·features; with ``features`` alone, these are the teacher.
    - Targets are averaged; with ``weights``, summed with these weights, or with learned ones (``"uncertainty"``,
      Kendall et al. 2018): Σ exp(−s)·L + s/2 with s = log σ². A hard task gets a small weight; s/2 bounds variances.

    ``classes`` holds class names by column of labels, in the order of the columns. ``distillation`` is ``hard``,
    ``soft`` or ``features``, None without a teacher; ``share`` is λ, by default 0.5, or 0.1 for ``soft``. Model and
    teacher are not kept.
    """

    @classmethod
    def of(
        cls,
        config: Config,
        model: nn.Module,
        classes: Mapping[str, Sequence[str]],
        teacher: Teacher | None,
        targets: Mapping[str, TargetSpec] | None = None,
    ) -> Objective:
        """Return the objective of a training configuration."""
        return cls(
            model,
            classes,
            smoothing=config.smoothing or 0.0,
            distillation=config.distillation,  # type: ignore[arg-type]
            teacher=teacher,
            share=config.distillation_weight,
            temperature=config.temperature or 3.0,
            feature_weight=config.feature_weight,
            weights="uncertainty" if config.weighting == "uncertainty" else config.task_weights or None,
            targets=targets,
        )

    def __init__(
        self,
        model: nn.Module,
        classes: Mapping[str, Sequence[str]],
        *,
        smoothing: float = 0.0,
        distillation: Distillation | None = None,
        teacher: Teacher | None = None,
        share: float | None = None,
        temperature: float = 3.0,
        feature_weight: float = 0.0,
        weights: Mapping[str, float] | Literal["uncertainty"] | None = None,
        targets: Mapping[str, TargetSpec] | None = None,
    ) -> None:
        super().__init__()
        self.heads = find_heads(model)
        self.targets = assign_targets(model, classes, targets)
        names = [target.name for target in self.targets]
        self.distillation, self.smoothing, self.temperature = distillation, smoothing, temperature
        if self.heads.distilled is not None and distillation == "features":
            raise InvalidOption(
                f"distillation='features' does not train the head of the token {self.heads.distilled!r}: use 'hard' or "
                "'soft' (with feature_weight for features), or remove the token"
            )
        if distillation in ("hard", "soft") and not any(target.own for target in self.targets):
            raise InvalidOption("where all labels belong to task tokens, no head can learn the teacher's predictions")
        check_distillation(self.targets, distillation)
        self.share = DISTILLATION_WEIGHTS[distillation] if share is None and distillation else share or 0.0
        self.feature_weight = self.share if distillation == "features" else feature_weight
        self.wants_features = self.feature_weight > 0
        self._outputs = required_outputs(self.heads, self.targets)
        fixed = weights if isinstance(weights, Mapping) else dict.fromkeys(names, 1 / len(names))
        if set(fixed) != set(names) or any(not isfinite(value) or value < 0 for value in fixed.values()):
            raise InvalidOption(
                f"task_weights={dict(fixed)}: expected a number of at least 0 for each of {', '.join(names)}"
            )
        self._weights: Tensor
        self.register_buffer("_weights", torch.tensor([float(fixed[name]) for name in names]), persistent=False)
        self.log_variance = nn.Parameter(torch.zeros(len(names))) if weights == "uncertainty" else None
        width = feature_width(model) if self.wants_features else 0
        self.projector = linear(width, teacher.width) if teacher and teacher.width and width else None

    def forward(
        self,
        output: Output,
        labels: Tensor,
        mixed: Mixed | None = None,
        taught: TeacherOutput | None = None,
        features: Tensor | None = None,
    ) -> Terms:
        """Return the loss of an output, given labels (B, T) and the teacher's output."""
        for head, expected in self._outputs.items():  # some models reveal the number only when they run
            check_outputs(head, output.by_role[head].shape[1], expected)
        if taught is not None and self.distillation in ("hard", "soft"):
            expected = sum(len(target.classes) for target in self.targets if target.own)
            if taught.logits.shape[1] != expected:
                raise InvalidOption(f"the teacher has {taught.logits.shape[1]} outputs, the student {expected} classes")
        partner, share = mixed or (None, None)
        parts: dict[str, Tensor] = {}
        each = []
        for target in self.targets:
            heads, truth, loss = target.heads, target.truth(labels), LOSSES[target.kind]
            predictions = target.predictions(output)
            if target.own and self.heads.distilled is not None and self.distillation is None:
                heads += (self.heads.distilled,)  # without a teacher it learns the labels
                predictions.append(target.read(output.by_role[self.heads.distilled]))
            losses = [loss(logits, truth, self.smoothing, partner, share) for logits in predictions]
            each.append(torch.stack(losses).mean())
            whole = target.task or not heads
            parts.update({target.label: each[-1]} if whole else zip(heads, losses, strict=True))
        losses_T = torch.stack(each)
        if self.log_variance is None:
            total = (losses_T * self._weights).sum()
        else:
            total = ((-self.log_variance).exp() * losses_T + self.log_variance / 2).sum()
        if taught is not None and self.distillation is not None:
            total = (1 - self.share) * total
            if self.distillation != "features":
                parts["distillation"] = self._distill(output, taught.logits)
                total = total + self.share * parts["distillation"]
            if features is not None:
                parts["features"] = self._compare_features(features, taught)
                total = total + self.feature_weight * parts["features"]
        return Terms(total, {name: part.detach() for name, part in parts.items()})

    def _distill(self, output: Output, teacher: Tensor) -> Tensor:
        """Return the distillation loss of the distillation head, or else of the class heads, averaged over targets."""
        heads = (self.heads.distilled,) if self.heads.distilled is not None else self.heads.own
        losses = []
        for target in (target for target in self.targets if target.own):
            for student in (target.read(output.by_role[head]) for head in heads):
                if self.distillation == "hard":  # DeiT
                    losses.append(cross_entropy(student, target.read(teacher).argmax(-1)))
                else:
                    losses.append(soft_distillation(student, target.read(teacher), self.temperature))
        return torch.stack(losses).mean()

    def _compare_features(self, features: Tensor, taught: TeacherOutput) -> Tensor:
        """Return the feature loss on the student's grid, or on its mean if the teacher's features are not a map."""
        assert taught.features is not None
        assert self.projector is not None
        target = taught.features
        if target.shape[2:] == (1, 1):
            features = features.mean((2, 3), keepdim=True)
        elif target.shape[2:] != features.shape[2:]:
            target = F.interpolate(target, features.shape[2:], mode="bilinear", antialias=True)
        student = self.projector(features.flatten(2).transpose(1, 2))
        return feature_distillation(student, target.flatten(2).transpose(1, 2))
