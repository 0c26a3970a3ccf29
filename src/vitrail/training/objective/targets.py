"""Targets: which heads of a model predict which column of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.data.sources.base import LABEL
from vitrail.errors import InvalidOption
from vitrail.heads.by_role import PATCH
from vitrail.models import ViT
from vitrail.tokens import Role
from vitrail.training.evaluation.outputs import CLASS, DISTILLATION

FUSED = "fused"
"""Name of the prediction that is fused from all heads with the same target."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model: ``own`` are those of class tokens or of pooled patches, ``sizes`` numbers of outputs."""

    own: tuple[str, ...]
    distilled: str | None
    tasks: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def fused(self) -> tuple[str, ...]:
        """Heads whose logits are averaged into the fused prediction."""
        return (*self.own, *([self.distilled] if self.distilled else []))


@dataclass(frozen=True)
class Target:
    """One column of labels and the heads that predict it.

    Attributes:
        name, column, classes: name of the column, its index among the labels, and class names.
        heads: heads that learn it from the labels.
        start: index of its first output in these heads; above 0 if a head predicts several columns.
        task: whether it is one of several targets.
        own: whether the class heads predict it, and so the fused prediction and the distillation head.
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
        """Name of its prediction in logs: ``task.NAME``, or ``fused`` for a single target."""
        return f"task.{self.name}" if self.task else FUSED

    def read(self, logits: Tensor) -> Tensor:
        """Return this target's logits from the outputs of a head."""
        return logits[:, self.start : self.start + len(self.classes)]


def find_heads(model: nn.Module) -> Heads:
    if not isinstance(model, ViT):
        count = getattr(model, "num_classes", getattr(getattr(model, "config", None), "num_labels", None))
        distilled = any(getattr(model, name, None) is not None for name in ("head_dist", "distillation_classifier"))
        names = (CLASS, DISTILLATION) if distilled else (CLASS,)
        sizes = dict.fromkeys(names, count) if isinstance(count, int) else {}
        return Heads((CLASS,), DISTILLATION if distilled else None, (), sizes)
    layers = {name: part for name, part in model.heads.named_children() if isinstance(part, nn.Linear)}
    roles: dict[str, Role] = {PATCH: Role.PATCH, **{spec.name: spec.role for spec in model.config.tokens}}
    found = {role: tuple(name for name in layers if roles[name] is role) for role in Role}
    regression = [spec.name for spec in model.config.tokens if spec.kind == "regression" and spec.name in layers]
    if regression:
        raise InvalidOption(f"labels are classes, but the tokens {', '.join(regression)} have kind='regression'")
    return Heads(
        found[Role.PATCH] + found[Role.CLASS],
        next(iter(found[Role.DISTILLATION]), None),
        found[Role.TASK],
        {name: part.out_features for name, part in layers.items()},
    )


def assign_targets(model: nn.Module, classes: Mapping[str, Sequence[str]]) -> tuple[Target, ...]:
    """Return the target of each column of labels; raise if a column has no head or a head has no column.

    A task token predicts the column of its name. The class heads predict the remaining column, or several: then the
    model's ``num_classes`` is the total number of classes, one column after the other.
    """
    heads = find_heads(model)
    rest = [name for name in classes if name not in heads.tasks]
    columns = ", ".join(classes)
    if not classes:
        raise InvalidOption("the data has no column of labels")
    if missing := [name for name in heads.tasks if name not in classes]:
        raise InvalidOption(
            f"no column for the task tokens {', '.join(missing)}: the columns are {columns}. List the columns in "
            "tasks, or remove the tokens"
        )
    if rest and not heads.own:
        found = ", ".join((*heads.fused, *heads.tasks)) or "no head"
        raise InvalidOption(
            f"no head for the labels {', '.join(rest)}: the model has {found}. Add a class token and num_classes, or a "
            "task token of that name"
        )
    if heads.fused and not rest:
        raise InvalidOption(
            f"no labels for the heads {', '.join(heads.fused)}: all columns ({columns}) belong to task tokens. Set "
            "num_classes=0"
        )
    targets, start = [], 0
    for column, (name, names) in enumerate(classes.items()):
        if name in heads.tasks:
            targets.append(Target(name, column, tuple(names), (name,), task=True, own=False))
        else:
            is_task = len(rest) > 1 or (len(classes) > 1 and name != LABEL)
            targets.append(Target(name, column, tuple(names), heads.own, start, is_task))
            start += len(names)
    for head, outputs in required_outputs(heads, targets).items():
        check_outputs(head, heads.sizes.get(head, outputs), outputs)
    return tuple(targets)


def required_outputs(heads: Heads, targets: Sequence[Target]) -> dict[str, int]:
    """Return the number of outputs that each head needs for its targets."""
    total = sum(len(target.classes) for target in targets if target.own)
    return dict.fromkeys(heads.fused, total) | {one.name: len(one.classes) for one in targets if not one.own}


def check_outputs(head: str, outputs: int, expected: int) -> None:
    """Raise if a head's number of outputs is not the number of classes."""
    if outputs != expected:
        raise InvalidOption(
            f"the head {head!r} has {outputs} outputs, but its labels have {expected} classes; build the model with "
            "this number of classes, or check the class names"
        )
