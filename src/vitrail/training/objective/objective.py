"""What a model is to learn: which head learns what from whom, and how the losses add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads import Output
from vitrail.heads.pooling import linear
from vitrail.training.evaluation.outputs import width_of
from vitrail.training.objective.losses import (
    FeatureLoss,
    Reduction,
    cross_entropy,
    feature_distillation,
    hard_distillation,
    soft_distillation,
    uncertainty,
)
from vitrail.training.objective.targets import Question, ask, check_outputs, heads_of, outputs_of
from vitrail.training.objective.teacher import Taught, Teacher

Distillation = Literal["hard", "soft", "features"]
Mixing = tuple[Tensor | None, Tensor | None]

SHARES: dict[Distillation, float] = {"hard": 0.5, "soft": 0.1, "features": 0.5}
"""How much of the loss is the teacher's, where nobody says: DeiT's values for logits."""


class Terms(NamedTuple):
    """The loss of a batch.

    Attributes:
        total: what to differentiate.
        parts: what it is made of, before weights and detached: by head, ``distillation``, ``features``, ``task.NAME``.
    """

    total: Tensor
    parts: dict[str, Tensor]


class Objective(nn.Module):
    """The losses of a model with heads of any roles.

    - Class heads (or pooled patches) and task heads learn from labels, by cross-entropy with smoothing; mixed pictures
      have the labels of both. Several class heads learn the same, and their losses are averaged.
    - The distillation head learns what the teacher says, without smoothing: the class it finds most likely (``hard``)
      or all its probabilities at a temperature (``soft``). In a model without that head the class heads learn it,
      too; without a teacher that head learns from labels.
    - ``features`` compares a projection of the model's patch features with the teacher's map, brought to the same
      grid. It stands alone, or beside ``hard`` and ``soft`` by ``feature_weight``.
    - In total: (1 − λ)·labels + λ·teacher + feature_weight·features; for ``features`` alone they are the teacher.
    - Several questions are averaged; with ``weights``, added with those; with ``"uncertainty"``, learned ones.

    Args:
        model: the model; it is looked at and not kept.
        classes: names of the classes by column of labels, in the order of the columns.
        smoothing: of true labels.
        distillation: ``hard``, ``soft`` or ``features``; None without a teacher.
        teacher: the teacher, where there is one; it is looked at and not kept.
        share: λ; by default 0.5, and 0.1 for ``soft``.
        temperature, reduction: of ``soft``; see :func:`~vitrail.training.objective.losses.soft_distillation`.
        feature_weight, feature_loss: of features.
        weights: of questions by name, or ``"uncertainty"``.
    """

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
        reduction: Reduction = "batchmean",
        feature_weight: float = 0.0,
        feature_loss: FeatureLoss = "cosine",
        weights: Mapping[str, float] | Literal["uncertainty"] | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads_of(model)
        self.questions = ask(model, classes)
        self.distillation, self.smoothing = distillation, smoothing
        self.temperature, self.reduction, self.feature_loss = temperature, reduction, feature_loss
        self._check_teaching(teacher, feature_weight)
        self.share = SHARES.get(distillation, 0.0) if share is None and distillation else share or 0.0
        self.feature_weight = self.share if distillation == "features" else feature_weight
        self._check_numbers()
        self._outputs = outputs_of(self.heads, self.questions)
        self._weights: Tensor
        self.register_buffer("_weights", torch.tensor(_weights(weights, self.questions)), persistent=False)
        self.log_variance = nn.Parameter(torch.zeros(len(self.questions))) if weights == "uncertainty" else None
        wide = width_of(model) if self.wants_features else 0
        self.projector = linear(wide, teacher.width) if teacher and teacher.width and wide else None

    @property
    def wants_features(self) -> bool:
        """Whether features of the model and of the teacher are compared."""
        return self.feature_weight > 0

    @property
    def _untaught(self) -> tuple[str, ...]:
        """The head of a distillation token without a teacher: it learns the labels, as the class token's does."""
        return (self.heads.distilled,) if self.heads.distilled is not None and self.distillation is None else ()

    def no_weight_decay(self) -> set[str]:
        """Name the parameters that weight decay should leave alone."""
        return {"log_variance"} if self.log_variance is not None else set()

    def forward(
        self,
        output: Output,
        labels: Tensor,
        mixed: Mixing | None = None,
        taught: Taught | None = None,
        features: Tensor | None = None,
    ) -> Terms:
        """Compare what a model says with labels (B, T) and with a teacher."""
        self._check_given(output, labels, taught)
        partner, share = mixed if mixed is not None and mixed[0] is not None else (None, None)
        parts: dict[str, Tensor] = {}
        each = []
        for one in self.questions:
            heads = one.heads + (self._untaught if one.own else ())
            losses = [
                cross_entropy(one.read(output.by_role[head]), labels[:, one.column], self.smoothing, partner, share)
                for head in heads
            ]
            each.append(torch.stack(losses).mean())
            names = [one.label] if one.task else heads
            parts.update(zip(names, [each[-1]] if one.task else losses, strict=True))
        total = self._weigh(torch.stack(each))
        if taught is not None and self.distillation is not None:
            total = (1 - self.share) * total
            if self.distillation != "features":
                parts["distillation"] = self._distil(output, taught.logits)
                total = total + self.share * parts["distillation"]
            if features is not None:
                parts["features"] = self._compare(features, taught)
                total = total + self.feature_weight * parts["features"]
        return Terms(total, {name: part.detach() for name, part in parts.items()})

    def _weigh(self, losses: Tensor) -> Tensor:
        if self.log_variance is not None:
            return uncertainty(losses, self.log_variance)
        return (losses * self._weights).sum()

    def _distil(self, output: Output, said: Tensor) -> Tensor:
        """Compare the distillation head, or else the class heads, with the teacher, question by question."""
        heads = (self.heads.distilled,) if self.heads.distilled is not None else self.heads.own
        losses = []
        for one in (one for one in self.questions if one.own):
            for student in (one.read(output.by_role[head]) for head in heads):
                if self.distillation == "hard":
                    losses.append(hard_distillation(student, one.read(said)))
                else:
                    losses.append(soft_distillation(student, one.read(said), self.temperature, self.reduction))
        return torch.stack(losses).mean()

    def _compare(self, features: Tensor, taught: Taught) -> Tensor:
        """Compare maps of features: the teacher's is brought to the student's grid; one vector with the mean."""
        assert taught.features is not None
        assert self.projector is not None
        target = taught.features
        if target.shape[2:] == (1, 1):
            features = features.mean((2, 3), keepdim=True)
        elif target.shape[2:] != features.shape[2:]:
            target = F.interpolate(target, features.shape[2:], mode="bilinear", antialias=True)
        student = self.projector(features.flatten(2).transpose(1, 2))
        return feature_distillation(student, target.flatten(2).transpose(1, 2), self.feature_loss)

    # Checks.

    def _check_teaching(self, teacher: Teacher | None, feature_weight: float) -> None:
        kind, head = self.distillation, self.heads.distilled
        if kind is not None and kind not in get_args(Distillation):
            raise InvalidOption(f"distillation is one of {', '.join(get_args(Distillation))}; got {kind!r}")
        if (kind is None) != (teacher is None):
            raise InvalidOption(
                f"distillation={kind!r} and {'a' if teacher else 'no'} teacher: expected both or neither"
            )
        if head is not None and kind == "features":
            raise InvalidOption(
                f"the head of the token {head!r} learns from a teacher's answers, and distillation is {kind!r}: choose "
                "'hard' or 'soft' (features may stand beside them, by feature_weight), or leave the token out"
            )
        if kind is not None and kind != "features" and not self.heads.own and head is None:
            raise InvalidOption("a model of task tokens alone has no head that could learn a teacher's answers")
        if feature_weight and kind is None:
            raise InvalidOption(f"feature_weight={feature_weight} needs a teacher")
        if (feature_weight or kind == "features") and teacher is not None and teacher.width is None:
            raise InvalidOption("features are compared, and the teacher gives none; make it with features=True")

    def _check_numbers(self) -> None:
        for name, value, right, expected in (
            ("smoothing", self.smoothing, 0 <= self.smoothing < 1, "0 or more and less than 1"),
            ("share", self.share, 0 <= self.share <= 1, "from 0 to 1"),
            ("temperature", self.temperature, self.temperature > 0, "more than 0"),
            ("feature_weight", self.feature_weight, self.feature_weight >= 0, "0 or more"),
        ):
            if not right or not isfinite(value):
                raise InvalidOption(f"{name}={value!r}; expected a number, {expected}")
        for name, chosen, known in (
            ("reduction", str(self.reduction), get_args(Reduction)),
            ("feature_loss", str(self.feature_loss), get_args(FeatureLoss)),
        ):
            if chosen not in known:
                raise InvalidOption(f"{name} is one of {', '.join(known)}; got {chosen!r}")

    def _check_given(self, output: Output, labels: Tensor, taught: Taught | None) -> None:
        """Check shapes, which are the same in every step, so that a wrong batch is not a strange number."""
        if labels.ndim != 2 or labels.shape[1] != len(self.questions):
            names = ", ".join(one.name for one in self.questions)
            raise UnsupportedInput(f"labels are (pictures, {len(self.questions)}: {names}); got {tuple(labels.shape)}")
        for head, needed in self._outputs.items():
            if head not in output.by_role:
                raise UnsupportedInput(f"the model gave no answer {head!r}, only {', '.join(output.by_role)}")
            check_outputs(head, output.by_role[head].shape[1], needed)
        if self.distillation is not None and taught is None:
            raise UnsupportedInput("there is a teacher to learn from, and this batch came without its answer")
        if taught is not None and self.distillation in ("hard", "soft"):
            needed = sum(len(one.classes) for one in self.questions if one.own)
            if taught.logits.shape[1] != needed:
                raise InvalidOption(
                    f"the teacher has {taught.logits.shape[1]} outputs and the student {needed} classes; a teacher "
                    "that knows more classes is told which of them are the student's (outputs)"
                )


def _weights(
    given: Mapping[str, float] | Literal["uncertainty"] | None, questions: Sequence[Question]
) -> tuple[float, ...]:
    """Give the weight of each question."""
    if given is None or given == "uncertainty":
        return (1 / len(questions),) * len(questions)
    if isinstance(given, str):
        raise InvalidOption(f"weights are numbers by question, or 'uncertainty'; got {given!r}")
    names = [one.name for one in questions]
    if set(given) != set(names) or any(not isfinite(value) or value < 0 for value in given.values()):
        raise InvalidOption(f"weights are numbers of 0 or more for each of {', '.join(names)}; got {dict(given)}")
    return tuple(float(given[name]) for name in names)
