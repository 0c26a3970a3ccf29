"""Metrics: sums over batches that ranks can add up, for the heads of a model or for its features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._distributed import all_gather, rank_and_world_size
from vitrail.analysis.roles import Disagreement, disagreement
from vitrail.data.labels.targets import CLASSES, TargetSpec, spans
from vitrail.errors import UnsupportedInput
from vitrail.heads import Output
from vitrail.training.evaluation.tallies import ClassTally, Tally, all_reduce, make_tally
from vitrail.training.objective.targets import Heads, Target, assign_targets, find_heads

NEIGHBORS = 20


def make_metrics(
    model: nn.Module,
    classes: Mapping[str, Sequence[str]],
    device: torch.device,
    known: Mapping[str, Sequence[str]] | None = None,
    targets: Mapping[str, TargetSpec] | None = None,
) -> Metrics:
    """Return metrics of a model's heads, or of its nearest neighbors if it has none.

    ``known`` holds the classes of everything that the model predicts, if the labels cover only some of it; ``targets``
    what columns hold that hold no classes.
    """
    heads, specs = find_heads(model), targets or {}
    dense = any(spec.pixel_bytes for spec in specs.values())
    if not heads.fused and not heads.tasks and not dense:
        if other := [name for name in classes if specs.get(name, CLASSES) != CLASSES]:
            raise UnsupportedInput(f"the model has no head for {other[0]!r}, and its neighbors vote on classes only")
        several = len(classes) > 1
        return NeighborMetrics({f"task.{name}" if several else "neighbours": classes[name] for name in classes}, device)
    assigned = assign_targets(model, known or classes, specs)
    return HeadMetrics(heads, assigned, classes, specs, device)


class Metrics(ABC):
    """Tallies of the predictions for each column of labels, and of further ones for the same classes.

    ``seen`` counts the samples of this rank; ``notes`` say what could not be measured.
    """

    def __init__(
        self, classes: Mapping[str, Sequence[str]], tallies: Mapping[str, Tally], device: torch.device
    ) -> None:
        self.notes: list[str] = []
        self.seen = 0
        self._device = device
        self._classes = {name: tuple(names) for name, names in classes.items()}
        self._tallies = dict(tallies)

    @abstractmethod
    def add(self, output: Output, labels: Tensor, by_token: dict[str, list[Tensor]]) -> None:
        """Count a batch; ``by_token`` holds the outputs of each token's head and is cleared."""

    def merge(self, other: Any) -> None:
        """Add what the same metrics of another process have counted, of samples that follow; before :meth:`reduce`."""
        for name, tally in self._tallies.items():
            tally.merge(other._tallies[name])
        self.seen += other.seen
        self.notes += [note for note in other.notes if note not in self.notes]

    def reduce(self) -> None:
        """Add up over ranks; every rank must call it."""
        for tally in self._tallies.values():
            tally.reduce()
        if not self._tallies[next(iter(self._classes))].count:
            raise UnsupportedInput("there are no samples to evaluate")

    def results(self) -> dict[str, Any]:
        """Return fields of `Evaluation`."""
        found = {name: tally.figures() for name, tally in self._tallies.items() if tally.count}
        main = {name: found[name] for name in self._classes}

        def picked(kinds: Sequence[str], given: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            return {kind: {name: one[kind] for name, one in given.items() if kind in one} for kind in kinds}

        return {
            "count": self._tallies[next(iter(main))].count,
            "loss": sum(figures["loss"] for figures in main.values()) / len(main),
            "classes": self._classes,
            "accuracy": {  # of a head that predicts several classes at once it says little
                name: one["accuracy"]
                for name, one in found.items()
                if "top5" in one or (name in main and "accuracy" in one)
            },
            **picked(("right", "rmse", "mae"), found),
            **picked(("top5", "calibration", "confusion", "r2", "mean_ap", "ap", "miou", "iou"), main),
        }


class HeadMetrics(Metrics):
    """Metrics of every head and of the fused prediction, for the columns that the data has labels for."""

    def __init__(
        self,
        heads: Heads,
        targets: Sequence[Target],
        columns: Mapping[str, Sequence[str]],
        specs: Mapping[str, TargetSpec],
        device: torch.device,
    ) -> None:
        places = spans(columns, specs)
        self._targets = [
            replace(one, where=slice(places[one.name].start, None) if one.spec.pixel_bytes else places[one.name])
            for one in targets
            if one.name in columns
        ]
        tallies = {target.label: make_tally(target, device) for target in self._targets}
        super().__init__({target.label: target.classes for target in self._targets}, tallies, device)
        self._fused = heads.fused
        own = [target for target in targets if target.own]
        self._single = len(own) == 1 and own[0].kind == "classification"
        self._heads: tuple[str, ...] = ()
        self._differ: Tensor | None = None
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        for target in self._targets:
            for head in self._fused if target.own else ():
                self._tallies[self._name(target, head)] = make_tally(target, device)

    def add(self, output: Output, labels: Tensor, by_token: dict[str, list[Tensor]]) -> None:
        for target in self._targets:
            truth = target.truth(labels)
            logits = target.prediction(output)
            self._nonfinite += (~logits.flatten(1).isfinite().all(-1)).sum()
            self._tallies[target.label].add(logits, truth)
            for head in self._fused if target.own else ():
                if head in output.by_role:
                    self._tallies[self._name(target, head)].add(target.read(output.by_role[head]), truth)
        self.seen += len(labels)
        if self._single and len(by_token) > 1:
            self._compare({name: parts[-1] for name, parts in by_token.items()}, len(labels))
        by_token.clear()

    def reduce(self) -> None:
        super().reduce()
        nonfinite = int(all_reduce(self._nonfinite).item())
        if nonfinite:
            self.notes.append(f"{nonfinite} predictions are not finite; their figures are meaningless")
        heads = int(all_reduce(torch.tensor(len(self._heads), device=self._device), maximum=True).item())
        if heads:  # a rank without samples has not seen any heads, but takes part
            mine = torch.zeros(3, heads, heads, dtype=torch.float64) if self._differ is None else self._differ
            self._differ = all_reduce(mine.to(self._device))
            self._heads = self._heads or tuple(map(str, range(heads)))

    def merge(self, other: HeadMetrics) -> None:
        super().merge(other)
        self._nonfinite += other._nonfinite.to(self._nonfinite)
        if other._differ is not None:
            theirs = other._differ.to(self._device)
            self._differ, self._heads = theirs if self._differ is None else self._differ + theirs, other._heads

    def results(self) -> dict[str, Any]:
        if self._differ is None:
            return super().results()
        argmax, divergence, count = self._differ.cpu()
        return {**super().results(), "disagreement": Disagreement(self._heads, argmax / count, divergence / count)}

    def _name(self, target: Target, head: str) -> str:
        return f"{target.label}.{head}" if target.task else head

    def _compare(self, by_token: dict[str, Tensor], count: int) -> None:
        try:
            found = disagreement(by_token)
        except UnsupportedInput as error:  # not finite
            self.notes = [f"disagreement: {error}"]
            return
        self._heads = found.heads
        sums = torch.stack([found.argmax, found.divergence, torch.ones_like(found.argmax)]) * count
        self._differ = sums if self._differ is None else self._differ + sums


class NeighborMetrics(Metrics):
    """Leave-one-out k-NN classification of the evaluated samples, for models without heads.

    Nothing is fitted, so the accuracy is about the features alone. It grows with the number of samples: compare models
    on the same data.
    """

    def __init__(self, classes: Mapping[str, Sequence[str]], device: torch.device) -> None:
        tallies = {name: ClassTally(len(names), device) for name, names in classes.items()}
        super().__init__(classes, tallies, device)
        self._voted = tallies
        self._batches: list[tuple[Tensor, Tensor]] = []

    def add(self, output: Output, labels: Tensor, by_token: dict[str, list[Tensor]]) -> None:
        by_token.clear()
        if output.logits is None:  # else pooled features
            raise UnsupportedInput("nothing to evaluate: the model has neither heads nor pooled features")
        self._batches.append((output.logits.float(), labels))
        self.seen += len(labels)

    def merge(self, other: NeighborMetrics) -> None:
        super().merge(other)
        self._batches += [(one.to(self._device), labels.to(self._device)) for one, labels in other._batches]

    def reduce(self) -> None:
        rank, world_size = rank_and_world_size()
        every = [self._batches]
        if world_size > 1:
            every = all_gather([(features.cpu(), labels.cpu()) for features, labels in self._batches])
        batches = [batch for part in every for batch in part]
        if sum(len(labels) for _, labels in batches) < 2:
            raise UnsupportedInput("k-NN evaluation needs at least two samples")
        memory, known = (torch.cat(part).to(self._device) for part in zip(*batches, strict=True))
        before = sum(len(labels) for part in every[:rank] for _, labels in part)
        for features, labels in self._batches:
            own = torch.arange(before, before + len(labels), device=self._device)
            for column, tally in enumerate(self._voted.values()):
                votes = neighbor_logits(memory, known[:, column], features, tally.classes, own=own)
                tally.add(votes, labels[:, column])
            before += len(labels)
        super().reduce()


def neighbor_logits(
    memory: Tensor,
    labels: Tensor,
    queries: Tensor,
    classes: int,
    k: int = NEIGHBORS,
    temperature: float = 0.07,
    *,
    own: Tensor | None = None,
) -> Tensor:
    """Return log-probabilities (B, C) of queries (B, D) by weighted k-NN over memory features (N, D).

    Neighbors are found by cosine similarity and weighted by exp(cosine / temperature), as in DINO. ``own`` (B,) holds
    the queries' indices in memory, if they are in it: a query does not vote for itself.
    """
    query, known = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (queries, memory))
    similarity = query @ known.T
    if own is not None:
        similarity.scatter_(1, own.unsqueeze(1), -torch.inf)
    near, which = similarity.topk(min(k, len(known) - (own is not None)), -1)
    votes = torch.zeros(len(queries), classes, device=queries.device)
    votes.scatter_add_(1, labels[which], (near / temperature).softmax(-1))
    return votes.clamp(min=1e-9).log().log_softmax(-1)
