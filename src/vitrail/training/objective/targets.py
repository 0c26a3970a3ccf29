"""Which head of a model answers which column of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from vitrail.data.sources.base import LABEL
from vitrail.errors import InvalidOption
from vitrail.heads.by_role import PATCH
from vitrail.models import ViT
from vitrail.tokens import Role
from vitrail.training.evaluation.outputs import CLASS, DISTILLATION

FUSED = "fused"
"""What the one answer of a model to its own question is called, beside those of its heads."""


@dataclass(frozen=True)
class HeadPlan:
    """The heads of a model by what they are for.

    Attributes:
        own: heads that answer the model's own question: of class tokens, or of pooled patches.
        distilled: the head of the distillation token.
        tasks: heads of task tokens.
        sizes: outputs of each head, where they are known before the model runs.
    """

    own: tuple[str, ...]
    distilled: str | None
    tasks: tuple[str, ...]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Question:
    """One column of labels, and who answers it.

    Attributes:
        name: of the column.
        column: its place among the labels.
        classes: names of its classes.
        heads: who learns it from the labels.
        start: the first of these heads' outputs that is about it; more than 0 where one head answers several.
        task: whether it is one of several.
        own: whether the class heads answer it, and so what they are fused into, and a distillation token.
    """

    name: str
    column: int
    classes: tuple[str, ...]
    heads: tuple[str, ...]
    start: int = 0
    task: bool = False
    own: bool = True

    @property
    def label(self) -> str:
        """What its one answer is called in logs: ``task.NAME``, or ``fused`` where there is one question."""
        return f"task.{self.name}" if self.task else FUSED

    def read(self, logits: Tensor) -> Tensor:
        """Take what is about this question from the outputs of a head, which may answer several."""
        return logits[:, self.start : self.start + len(self.classes)]


def heads_of(model: nn.Module) -> HeadPlan:
    """Say what the heads of a model are for."""
    if not isinstance(model, ViT):
        count = getattr(model, "num_classes", getattr(getattr(model, "config", None), "num_labels", None))
        distilled = any(getattr(model, name, None) is not None for name in ("head_dist", "distillation_classifier"))
        names = (CLASS, DISTILLATION) if distilled else (CLASS,)
        sizes = dict.fromkeys(names, count) if isinstance(count, int) else {}
        return HeadPlan((CLASS,), DISTILLATION if distilled else None, (), sizes)
    named = {name: part for name, part in model.heads.named_children() if isinstance(part, nn.Linear)}
    roles: dict[str, Role] = {PATCH: Role.PATCH, **{spec.name: spec.role for spec in model.config.tokens}}
    found = {role: tuple(name for name in named if roles[name] is role) for role in Role}
    regress = [spec.name for spec in model.config.tokens if spec.kind == "regression" and spec.name in named]
    if regress:
        raise InvalidOption(f"labels are classes; the tokens {', '.join(regress)} have kind='regression'")
    return HeadPlan(
        found[Role.PATCH] + found[Role.CLASS],
        next(iter(found[Role.DISTILLATION]), None),
        found[Role.TASK],
        {name: part.out_features for name, part in named.items()},
    )


def ask(model: nn.Module, classes: Mapping[str, Sequence[str]]) -> tuple[Question, ...]:
    """Say which heads answer which column of labels; raise where a column or a head is left alone.

    A task token answers the column of its name. What is left is for the class heads: one column; or several, and
    then the model's ``num_classes`` is the number of classes of all of them, one column after the other. That is one
    token with several heads, the control of task tokens.
    """
    heads = heads_of(model)
    rest = [name for name in classes if name not in heads.tasks]
    _check_columns(heads, classes, rest)
    found, start = [], 0
    for column, (name, names) in enumerate(classes.items()):
        if name in heads.tasks:
            found.append(Question(name, column, tuple(names), (name,), task=True, own=False))
        else:
            one_of_several = len(rest) > 1 or (len(classes) > 1 and name != LABEL)
            found.append(Question(name, column, tuple(names), heads.own, start, one_of_several))
            start += len(names)
    for head, needed in outputs_of(heads, found).items():
        check_outputs(head, heads.sizes.get(head, needed), needed)
    return tuple(found)


def some(asked: Sequence[Question], columns: Sequence[str]) -> tuple[Question, ...]:
    """Leave the questions that the data has labels for, by the places of their columns there."""
    return tuple(replace(one, column=columns.index(one.name)) for one in asked if one.name in columns)


def outputs_of(heads: HeadPlan, asked: Sequence[Question]) -> dict[str, int]:
    """Count the outputs that each head needs for what it is asked."""
    together = sum(len(one.classes) for one in asked if one.own)
    needed = dict.fromkeys((*heads.own, *([heads.distilled] if heads.distilled else [])), together)
    return needed | {one.name: len(one.classes) for one in asked if not one.own}


def check_outputs(head: str, outputs: int, needed: int) -> None:
    """Raise where a head has another number of outputs than there are classes for it."""
    if outputs != needed:
        raise InvalidOption(
            f"the head {head!r} has {outputs} outputs, and the labels for it {needed} classes; build the model with as "
            "many, or check the names of the classes"
        )


def _check_columns(heads: HeadPlan, classes: Mapping[str, Sequence[str]], rest: Sequence[str]) -> None:
    if not classes:
        raise InvalidOption("there is no column of labels to learn from")
    lost = [name for name in heads.tasks if name not in classes]
    if lost:
        raise InvalidOption(
            f"the task tokens {', '.join(lost)} have no column of labels: there are {', '.join(classes)}. Name the "
            "columns as tasks, or leave the tokens out"
        )
    answers = [*heads.own, *([heads.distilled] if heads.distilled else [])]
    if rest and not heads.own:
        raise InvalidOption(
            f"no head is for the labels {', '.join(rest)}: the model has "
            f"{', '.join((*answers, *heads.tasks)) or 'no head'}. Give it a class token and num_classes, or a task "
            "token of that name"
        )
    if answers and not rest:
        raise InvalidOption(
            f"the heads {', '.join(answers)} have no labels: all columns ({', '.join(classes)}) are for task tokens. "
            "Set num_classes=0"
        )
