"""What the answers of a model did, over batches and processes: of its heads, or of its features where it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitrail._distributed import gathered, ranks
from vitrail.analysis.roles import Disagreement, disagreement
from vitrail.errors import UnsupportedInput
from vitrail.heads import Output
from vitrail.training.evaluation.metrics import Tally, neighbour_logits, reduce
from vitrail.training.objective.targets import HeadPlan, Question, ask, heads_of, some

NEIGHBOURS = 20


class Counts(Protocol):
    """Counts batches, adds up over processes, and gives what an ``Evaluation`` says about answers.

    Attributes:
        seen: pictures that this process has counted.
        notes: what could not be measured.
    """

    seen: int
    notes: list[str]

    def add(self, output: Output, labels: Tensor, heard: dict[str, list[Tensor]]) -> None:
        """Count a batch; what was heard of each token's head is compared and forgotten."""
        ...

    def reduce(self) -> None:
        """Add up over processes; all of them take part, also those without pictures."""
        ...

    def results(self) -> dict[str, Any]:
        """Give what an `Evaluation` says about answers."""
        ...


def counts_for(
    model: nn.Module,
    classes: Mapping[str, Sequence[str]],
    device: torch.device,
    known: Mapping[str, Sequence[str]] | None = None,
) -> Counts:
    """Count what heads say; of a model without heads, what the nearest of the other pictures say.

    ``known`` are the classes of all that the model answers, where the labels are about some of it.
    """
    plan = heads_of(model)
    if not plan.own and not plan.tasks and plan.distilled is None:
        return NeighbourCounts(classes, device)
    asked = ask(model, known or classes)
    return HeadCounts(plan, some(asked, list(classes)), device, alone=sum(one.own for one in asked) == 1)


class HeadCounts:
    """What all answers of a model did, over batches; ``alone`` where its class heads answer one question."""

    def __init__(self, plan: HeadPlan, asked: Sequence[Question], device: torch.device, *, alone: bool) -> None:
        self.notes: list[str] = []
        self.asked, self.seen = asked, 0
        self._fused = (*plan.own, *([plan.distilled] if plan.distilled else []))
        self._alone = alone
        self._tallies: dict[str, tuple[Question, Tally]] = {}
        self._device = device
        self._heads: tuple[str, ...] = ()
        self._differ: Tensor | None = None
        self._broken = torch.zeros((), dtype=torch.int64, device=device)
        for one in asked:
            self._tallies[one.label] = one, Tally(len(one.classes), device)
            for head in self._fused if one.own else ():
                self._tallies[self._name(one, head)] = one, Tally(len(one.classes), device)

    def add(self, output: Output, labels: Tensor, heard: dict[str, list[Tensor]]) -> None:
        """Count a batch; what was heard of each token's head is compared and forgotten."""
        for one in self.asked:
            truth = labels[:, one.column]
            whole = output.logits if one.own else output.by_role[one.name]
            assert whole is not None
            scores = one.read(whole)
            self._broken += (~scores.isfinite().all(-1)).sum()
            self._tallies[one.label][1].add(scores, truth)
            for head in self._fused if one.own else ():
                if head in output.by_role:
                    self._tallies[self._name(one, head)][1].add(one.read(output.by_role[head]), truth)
        self.seen += len(labels)
        if self._alone and len(heard) > 1:
            self._compare({name: parts[-1] for name, parts in heard.items()}, len(labels))
        heard.clear()

    def reduce(self) -> None:
        """Add up over processes."""
        for _, tally in self._tallies.values():
            reduce(tally.sums)
        broken = int(reduce(self._broken).item())
        if broken:
            self.notes.append(f"{broken} answers are not finite numbers: what is said of these pictures means nothing")
        heads = int(reduce(torch.tensor(len(self._heads), device=self._device), most=True).item())
        if heads:  # all processes take part, also one that had no pictures and heard no heads
            mine = torch.zeros(3, heads, heads, dtype=torch.float64) if self._differ is None else self._differ
            self._differ = reduce(mine.to(self._device))
            self._heads = self._heads or tuple(map(str, range(heads)))
        if not self._tallies[self.asked[0].label][1].count:
            raise UnsupportedInput("there were no pictures to evaluate")

    def results(self) -> dict[str, Any]:
        """Give what an `Evaluation` says about answers."""
        tallies = {name: tally for name, (_, tally) in self._tallies.items() if tally.count}
        main = {one.label: tallies[one.label] for one in self.asked}
        classes = {one.label: one.classes for one in self.asked}
        return {**_results(main, classes), **_by_answer(tallies), "disagreement": self._disagreement()}

    def _name(self, one: Question, head: str) -> str:
        return f"{one.label}.{head}" if one.task else head

    def _compare(self, heard: dict[str, Tensor], count: int) -> None:
        try:
            found = disagreement(heard)
        except UnsupportedInput as error:  # answers that are not finite
            self.notes = [f"disagreement: {error}"]
            return
        self._heads = found.heads
        number = torch.full_like(found.argmax, count)
        sums = torch.stack([found.argmax * count, found.divergence * count, number])
        self._differ = sums if self._differ is None else self._differ + sums

    def _disagreement(self) -> Disagreement | None:
        if self._differ is None:
            return None
        argmax, divergence, count = self._differ.cpu()
        return Disagreement(self._heads, argmax / count, divergence / count)


class NeighbourCounts:
    """Classifies every picture by its nearest neighbours among all others that were evaluated (leave one out).

    Nothing is fitted, so the accuracy is about the features alone. It grows with the number of pictures: compare
    models on the same ones.
    """

    def __init__(self, classes: Mapping[str, Sequence[str]], device: torch.device) -> None:
        self.notes: list[str] = []
        self.seen = 0
        several = len(classes) > 1
        self._classes = {f"task.{name}" if several else "neighbours": tuple(names) for name, names in classes.items()}
        self._features: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._tallies = {name: Tally(len(names), device) for name, names in self._classes.items()}

    def add(self, output: Output, labels: Tensor, heard: dict[str, list[Tensor]]) -> None:
        """Keep the pooled features of a batch, which a model without heads gives in the place of logits."""
        heard.clear()
        if output.logits is None:
            raise UnsupportedInput("the model has neither heads nor pooled features; there is nothing to evaluate")
        self._features.append(output.logits.float())
        self._labels.append(labels)
        self.seen += len(labels)

    def reduce(self) -> None:
        """Let each process classify its pictures by those of all, and add up."""
        mine = (torch.cat(self._features), torch.cat(self._labels)) if self.seen else None
        rank, everyone = _gathered(mine)
        parts = [part for part in everyone if part is not None]
        if sum(len(part[0]) for part in parts) < 2:
            raise UnsupportedInput("neighbours need two pictures or more to evaluate")
        if mine is not None:
            features, labels = mine
            before = sum(len(part[0]) for part in everyone[:rank] if part is not None)
            own = torch.arange(before, before + len(features), device=features.device)
            memory, known = (torch.cat([part[i].to(features.device) for part in parts]) for i in (0, 1))
            for column, (name, tally) in enumerate(self._tallies.items()):
                k, classes = NEIGHBOURS, len(self._classes[name])
                for x, y, at in zip(*(part.split(1024) for part in (features, labels, own)), strict=True):
                    said = neighbour_logits(memory, known[:, column], x, classes, k, own=at)
                    tally.add(said, y[:, column])
        for tally in self._tallies.values():
            reduce(tally.sums)

    def results(self) -> dict[str, Any]:
        """Give what an `Evaluation` says about answers."""
        return {**_results(self._tallies, self._classes), **_by_answer(self._tallies)}


def _results(tallies: Mapping[str, Tally], classes: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    return {
        "count": next(iter(tallies.values())).count,
        "top5": {name: tally.top5 for name, tally in tallies.items()},
        "loss": sum(tally.loss for tally in tallies.values()) / len(tallies),
        "calibration": {name: tally.calibration for name, tally in tallies.items()},
        "confusion": {name: tally.confusion for name, tally in tallies.items()},
        "classes": dict(classes),
    }


def _by_answer(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    return {
        "accuracy": {name: tally.accuracy for name, tally in tallies.items()},
        "right": {name: tally.right for name, tally in tallies.items()},
    }


def _gathered(mine: tuple[Tensor, Tensor] | None) -> tuple[int, list[tuple[Tensor, Tensor] | None]]:
    """Give this process's number and what all processes have, in their order."""
    rank, world = ranks()
    if world == 1:
        return 0, [mine]
    return rank, gathered(None if mine is None else (mine[0].cpu(), mine[1].cpu()))
