"""Metrics: sums over batches that ranks can add up, for the heads of a model or for its features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail._distributed import all_gather, rank_and_world_size
from vitrail.analysis.roles import Disagreement, disagreement
from vitrail.errors import UnsupportedInput
from vitrail.heads import Output
from vitrail.training.objective.targets import Heads, Target, assign_targets, find_heads

BINS = 15
"""Confidence bins of the calibration error."""
NEIGHBORS = 20


def all_reduce(values: Tensor, *, maximum: bool = False) -> Tensor:
    """Sum a tensor over all ranks in place, or take its maximum; do nothing with one rank."""
    if rank_and_world_size()[1] > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
    return values


class Tally:
    """Accuracy, loss, calibration and confusion of one prediction, as one vector of sums on the device.

    Nothing is copied from the device before a result is read. The vectors of several ranks add up.

    >>> tally = Tally(3)
    >>> tally.add(torch.tensor([[2.0, 0, 0], [0, 2.0, 0]]), torch.tensor([0, 2]))
    >>> tally.figures()["accuracy"], tally.figures()["confusion"].tolist()
    (0.5, [[1, 0, 0], [0, 0, 0], [0, 1, 0]])
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # both represent counts exactly
        self.sums = torch.zeros(4 + 3 * BINS + classes**2, dtype=dtype, device=device)
        self._correct: list[Tensor] = []

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits or log-probabilities (B, C), labels (B,)."""
        log_p = logits.float().log_softmax(-1).to(self.sums)
        confidence, predicted = log_p.max(-1)
        confidence = confidence.exp()
        self._correct.append(predicted == labels)
        correct = self._correct[-1].to(self.sums)
        top5 = log_p.topk(min(5, self.classes), -1).indices
        in_top5 = (top5 == labels.unsqueeze(-1)).any(-1).to(self.sums)
        loss = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        self.sums[:4] += torch.stack([torch.ones_like(loss), correct, in_top5, loss]).sum(1)
        place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # bins are open below and closed above
        bins = self.sums[4 : 4 + 3 * BINS].view(3, BINS)
        bins.index_add_(1, place, torch.stack([torch.ones_like(loss), confidence, correct]))
        self.sums[4 + 3 * BINS :].index_add_(0, labels * self.classes + predicted, torch.ones_like(loss))

    def merge(self, other: Tally) -> None:
        """Add what another tally has counted, of samples that follow."""
        self.sums += other.sums.to(self.sums)
        self._correct += [part.to(self.sums.device) for part in other._correct]

    @property
    def count(self) -> int:
        return round(self.sums[0].item())

    def figures(self) -> dict[str, Any]:
        """Return top-1 and top-5 accuracy, mean cross-entropy, calibration error and confusion matrix of all samples.

        ``right`` says for each sample whether it was classified correctly (N,), in the order of the data; of this rank.
        """
        sums = self.sums.cpu()
        count, confidence, correct = sums[4 : 4 + 3 * BINS].view(3, BINS).double()
        return {
            **{name: (sums[i] / sums[0]).item() for i, name in enumerate(("accuracy", "top5", "loss"), 1)},
            "calibration": ((confidence - correct).abs().sum() / count.sum()).item(),
            "confusion": sums[4 + 3 * BINS :].view(self.classes, self.classes).round().long(),
            "right": torch.cat(self._correct).cpu() if self._correct else torch.zeros(0, dtype=torch.bool),
        }


def make_metrics(
    model: nn.Module,
    classes: Mapping[str, Sequence[str]],
    device: torch.device,
    known: Mapping[str, Sequence[str]] | None = None,
) -> Metrics:
    """Return metrics of a model's heads, or of its nearest neighbors if it has none.

    ``known`` holds the classes of everything that the model predicts, if the labels cover only some of it.
    """
    heads = find_heads(model)
    if not heads.fused and not heads.tasks:
        several = len(classes) > 1
        return NeighborMetrics({f"task.{name}" if several else "neighbours": classes[name] for name in classes}, device)
    targets = assign_targets(model, known or classes)
    return HeadMetrics(heads, targets, list(classes), device)


class Metrics(ABC):
    """Tallies of the predictions for each column of labels, and of further ones for the same classes.

    ``seen`` counts the samples of this rank; ``notes`` say what could not be measured.
    """

    def __init__(self, classes: Mapping[str, Sequence[str]], device: torch.device) -> None:
        self.notes: list[str] = []
        self.seen = 0
        self._device = device
        self._classes = {name: tuple(names) for name, names in classes.items()}
        self._tallies = {name: Tally(len(names), device) for name, names in classes.items()}

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
            all_reduce(tally.sums)
        if not self._tallies[next(iter(self._classes))].count:
            raise UnsupportedInput("there are no samples to evaluate")

    def results(self) -> dict[str, Any]:
        """Return fields of `Evaluation`."""
        found = {name: tally.figures() for name, tally in self._tallies.items() if tally.count}
        main = {name: found[name] for name in self._classes}
        return {
            "count": self._tallies[next(iter(main))].count,
            "loss": sum(figures["loss"] for figures in main.values()) / len(main),
            "classes": self._classes,
            **{kind: {name: one[kind] for name, one in found.items()} for kind in ("accuracy", "right")},
            **{kind: {name: one[kind] for name, one in main.items()} for kind in ("top5", "calibration", "confusion")},
        }


class HeadMetrics(Metrics):
    """Metrics of every head and of the fused prediction, for the columns that the data has labels for."""

    def __init__(self, heads: Heads, targets: Sequence[Target], columns: list[str], device: torch.device) -> None:
        self._targets = [replace(one, column=columns.index(one.name)) for one in targets if one.name in columns]
        super().__init__({target.label: target.classes for target in self._targets}, device)
        self._fused = heads.fused
        self._single = sum(target.own for target in targets) == 1
        self._heads: tuple[str, ...] = ()
        self._differ: Tensor | None = None
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        for target in self._targets:
            for head in self._fused if target.own else ():
                self._tallies[self._name(target, head)] = Tally(len(target.classes), device)

    def add(self, output: Output, labels: Tensor, by_token: dict[str, list[Tensor]]) -> None:
        for target in self._targets:
            truth = labels[:, target.column]
            logits = output.logits if target.own else output.by_role[target.name]
            assert logits is not None
            logits = target.read(logits)
            self._nonfinite += (~logits.isfinite().all(-1)).sum()
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
        super().__init__(classes, device)
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
            for column, tally in enumerate(self._tallies.values()):
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
