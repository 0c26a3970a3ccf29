"""Targets: which heads of a model predict which column of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

from torch import Tensor, nn

from vitrail.data.labels.targets import CLASSES, Kind, TargetSpec, spans
from vitrail.data.sources.base import LABEL
from vitrail.errors import InvalidOption
from vitrail.heads.by_role import PATCH, Output
from vitrail.models import ViT
from vitrail.surgery.added_tokens import added_module
from vitrail.tokens import Role
from vitrail.training.evaluation.outputs import CLASS, DISTILLATION

FUSED = "fused"
"""Name of the prediction that is fused from all heads with the same target."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model: ``own`` are those of class tokens or of pooled patches, ``sizes`` numbers of outputs.

    ``added`` says whether the model has added tokens; it may then keep heads that no column of labels is for.
    """

    own: tuple[str, ...]
    distilled: str | None
    tasks: tuple[str, ...]
    sizes: dict[str, int]
    added: bool = False

    @property
    def fused(self) -> tuple[str, ...]:
        """Heads whose logits are averaged into the fused prediction."""
        return (*self.own, *([self.distilled] if self.distilled else []))


@dataclass(frozen=True)
class Target:
    """One column of labels and the heads that predict it.

    Attributes:
        name, where, classes: name of the column, its place in the table of labels, and class names.
        heads: heads that learn it from the labels.
        start: index of its first output in these heads; above 0 if a head predicts several columns.
        task: whether it is one of several targets.
        own: whether the class heads predict it, and so the fused prediction and the distillation head.
        spec: what the column holds.
    """

    name: str
    where: slice
    classes: tuple[str, ...]
    heads: tuple[str, ...]
    start: int = 0
    task: bool = False
    own: bool = True
    spec: TargetSpec = CLASSES

    @property
    def kind(self) -> Kind:
        """What the column holds."""
        return self.spec.kind

    @property
    def label(self) -> str:
        """Name of its prediction in logs: ``task.NAME``, or ``fused`` for a single target."""
        return f"task.{self.name}" if self.task else FUSED

    def read(self, logits: Tensor) -> Tensor:
        """Return this target's logits from the outputs of a head."""
        return logits[:, self.start : self.start + len(self.classes)]

    def values(self, outputs: Tensor) -> Tensor:
        """Return the values of a regression, or depths, from its outputs."""
        return outputs.float() * self.spec.std + self.spec.mean

    def truth(self, labels: Tensor) -> Tensor:
        """Return what is to be learned from the table of labels (B, W), as the loss takes it.

        Class numbers (B,), standardized values (B, 1), 0 or 1 for each class (B, K), a mask (B, H, W), or standardized
        depths (B, H, W), NaN where unknown.
        """
        part = labels[:, self.where]
        if self.kind == "classification":
            return part[:, 0].long()
        if self.kind in ("regression", "depth"):
            part = (part - self.spec.mean) / self.spec.std
        if self.spec.pixel_bytes:
            side = isqrt(part.shape[1])
            part = part.unflatten(1, (side, side))
        return part.long() if self.kind == "dense" else part

    def predictions(self, output: Output) -> list[Tensor]:
        """Return the logits of each head that learns this target."""
        if self.spec.pixel_bytes:
            assert output.dense is not None
            return [output.dense]
        return [self.read(output.by_role[head]) for head in self.heads]

    def prediction(self, output: Output) -> Tensor:
        """Return the logits of the model for this target, fused from all its heads."""
        if self.spec.pixel_bytes:
            return self.predictions(output)[0]
        logits = output.logits if self.own else output.by_role[self.name]
        assert logits is not None
        return self.read(logits)


def find_heads(model: nn.Module) -> Heads:
    """Return the heads of a model, with those of added tokens."""
    heads, added = _find_own_heads(model), added_module(model)
    if added is None:
        return heads
    sizes = {name: head.out_features for name, head in added.heads.items() if isinstance(head, nn.Linear)}
    named = {role: [spec.name for spec in added.specs if spec.role is role] for role in Role}
    return Heads(
        heads.own,
        heads.distilled or next(iter(named[Role.DISTILLATION]), None),
        (*heads.tasks, *named[Role.TASK]),
        heads.sizes | sizes,
        added=True,
    )


def _find_own_heads(model: nn.Module) -> Heads:
    if not isinstance(model, ViT):
        count = getattr(model, "num_classes", getattr(getattr(model, "config", None), "num_labels", None))
        distilled = any(getattr(model, name, None) is not None for name in ("head_dist", "distillation_classifier"))
        names = (CLASS, DISTILLATION) if distilled else (CLASS,)
        sizes = dict.fromkeys(names, count) if isinstance(count, int) else {}
        return Heads((CLASS,), DISTILLATION if distilled else None, (), sizes)
    layers = {name: part for name, part in model.heads.named_children() if isinstance(part, nn.Linear)}
    roles: dict[str, Role] = {PATCH: Role.PATCH, **{spec.name: spec.role for spec in model.config.tokens}}
    found = {role: tuple(name for name in layers if roles[name] is role) for role in Role}
    return Heads(
        found[Role.PATCH] + found[Role.CLASS],
        next(iter(found[Role.DISTILLATION]), None),
        found[Role.TASK],
        {name: part.out_features for name, part in layers.items()},
    )


def assign_targets(
    model: nn.Module, classes: Mapping[str, Sequence[str]], specs: Mapping[str, TargetSpec] | None = None
) -> tuple[Target, ...]:
    """Return the target of each column of labels; raise if a column has no head or a head has no column.

    A task token predicts the column of its name. The class heads predict the remaining column, or several: then the
    model's ``num_classes`` is the total number of classes, one column after the other. ``specs`` says what columns hold
    that hold no classes; masks and depth maps are predicted by a dense head.
    """
    heads, specs = find_heads(model), specs or {}
    dense = [name for name, spec in specs.items() if spec.pixel_bytes and name in classes]
    rest = [name for name in classes if name not in (*heads.tasks, *dense)]
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
    if heads.fused and not rest and not heads.added:
        raise InvalidOption(
            f"no labels for the heads {', '.join(heads.fused)}: all columns ({columns}) belong to task tokens. Set "
            "num_classes=0"
        )
    _check_kinds(model, heads, classes, specs, dense)
    targets, start, places = [], 0, spans(classes, specs)
    for name, names in classes.items():
        spec, where = specs.get(name, CLASSES), places[name]
        if name in dense:
            where, several = slice(where.start, None), len(classes) > 1
            targets.append(Target(name, where, tuple(names), (), task=several, own=False, spec=spec))
        elif name in heads.tasks:
            targets.append(Target(name, where, tuple(names), (name,), task=True, own=False, spec=spec))
        else:
            is_task = len(rest) > 1 or (len(classes) > 1 and name != LABEL)
            targets.append(Target(name, where, tuple(names), heads.own, start, is_task, spec=spec))
            start += len(names)
    for head, outputs in required_outputs(heads, targets).items():
        check_outputs(head, heads.sizes.get(head, outputs), outputs)
    return tuple(targets)


def _check_kinds(
    model: nn.Module,
    heads: Heads,
    classes: Mapping[str, Sequence[str]],
    specs: Mapping[str, TargetSpec],
    dense: Sequence[str],
) -> None:
    """Raise if heads are of another kind than their columns, or a dense head and masks do not go together."""
    outputs = model.config.dense if isinstance(model, ViT) else 0
    if len(dense) > 1:
        raise InvalidOption(
            f"tasks: {' and '.join(dense)} are both targets of pixels, and a model has one dense head; train one of "
            "them, and the other in a run of its own"
        )
    if dense and len(classes[dense[0]]) != outputs:
        raise InvalidOption(
            f"no head for the pixels of {', '.join(dense)}: expected a Vitrail model with one dense head of "
            f"{len(classes[dense[0]])} outputs; build it with dense={len(classes[dense[0]])}. Models of timm can be "
            "converted first: vitrail.models.from_timm"
        )
    if outputs and not dense:
        raise InvalidOption("no masks for the dense head: expected a column of masks or depth maps; set dense=0")
    own = [specs.get(name, CLASSES).kind for name in classes if name not in (*heads.tasks, *dense)]
    for token in model.config.tokens if isinstance(model, ViT) else ():
        learned = [specs.get(token.name, CLASSES).kind] if token.name in heads.tasks else own
        if token.kind == "regression" and learned and set(learned) != {"regression"}:
            raise InvalidOption(f"the token {token.name!r} has kind='regression', and its labels are no values")


def required_outputs(heads: Heads, targets: Sequence[Target]) -> dict[str, int]:
    """Return the number of outputs that each head needs for its targets."""
    total = sum(len(target.classes) for target in targets if target.own)
    return dict.fromkeys(heads.fused if total else (), total) | {
        one.name: len(one.classes) for one in targets if not one.own and one.heads
    }


def check_outputs(head: str, outputs: int, expected: int) -> None:
    """Raise if a head's number of outputs is not the number of classes."""
    if outputs != expected:
        raise InvalidOption(
            f"the head {head!r} has {outputs} outputs, but its labels have {expected} classes; build the model with "
            "this number of classes, or check the class names"
        )
