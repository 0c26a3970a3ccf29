"""Metrics: sums over batches that ranks can add up, for the heads of a model or for its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail._distributed import all_gather, rank_and_world_size
from vitrail.analysis.roles import Disagreement, disagreement
from vitrail.errors import UnsupportedInput
from vitrail.heads import Output
from vitrail.training.objective.targets import Heads, Target, assign_targets, find_heads, select_columns

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
    >>> tally.accuracy, tally.confusion.tolist()
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

    @property
    def right(self) -> Tensor:
        """Whether each sample was classified correctly (N,), in the order of the data; of this rank only."""
        return torch.cat(self._correct).cpu() if self._correct else torch.zeros(0, dtype=torch.bool)

    @property
    def count(self) -> int:
        """Number of samples."""
        return round(self.sums[0].item())

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy."""
        return (self.sums[1] / self.sums[0]).item()

    @property
    def top5(self) -> float:
        """Top-5 accuracy."""
        return (self.sums[2] / self.sums[0]).item()

    @property
    def loss(self) -> float:
        """Mean cross-entropy, without label smoothing."""
        return (self.sums[3] / self.sums[0]).item()

    @property
    def calibration(self) -> float:
        """Expected calibration error."""
        count, confidence, correct = self.sums[4 : 4 + 3 * BINS].view(3, BINS).double().cpu()
        return ((confidence - correct).abs().sum() / count.sum()).item()

    @property
    def confusion(self) -> Tensor:
        """Confusion matrix (C, C): true classes in rows, predictions in columns."""
        return self.sums[4 + 3 * BINS :].view(self.classes, self.classes).round().long().cpu()


def make_metrics(
    model: nn.Module,
    classes: Mapping[str, Sequence[str]],
    device: torch.device,
    known: Mapping[str, Sequence[str]] | None = None,
) -> HeadMetrics | NeighborMetrics:
    """Return metrics of a model's heads, or of its nearest neighbors if it has none.

    ``known`` holds the classes of everything that the model predicts, if the labels cover only some of it.
    """
    heads = find_heads(model)
    if not heads.own and not heads.tasks and heads.distilled is None:
        return NeighborMetrics(classes, device)
    targets = assign_targets(model, known or classes)
    single = sum(target.own for target in targets) == 1
    return HeadMetrics(heads, select_columns(targets, list(classes)), device, single=single)


class HeadMetrics:
    """Metrics of every head and of the fused prediction; ``single`` if the class heads have one target.

    ``seen`` counts the samples of this rank; ``notes`` say what could not be measured.
    """

    def __init__(self, heads: Heads, targets: Sequence[Target], device: torch.device, *, single: bool) -> None:
        self.notes: list[str] = []
        self.targets, self.seen = targets, 0
        self._fused = heads.fused
        self._single = single
        self._tallies: dict[str, Tally] = {}
        self._device = device
        self._heads: tuple[str, ...] = ()
        self._differ: Tensor | None = None
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        for target in targets:
            self._tallies[target.label] = Tally(len(target.classes), device)
            for head in self._fused if target.own else ():
                self._tallies[self._name(target, head)] = Tally(len(target.classes), device)

    def add(self, output: Output, labels: Tensor, heard: dict[str, list[Tensor]]) -> None:
        """Count a batch; ``heard`` holds the outputs of each token's head and is cleared."""
        for target in self.targets:
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
        if self._single and len(heard) > 1:
            self._compare({name: parts[-1] for name, parts in heard.items()}, len(labels))
        heard.clear()

    def reduce(self) -> None:
        """Add up over ranks; every rank must call it."""
        for tally in self._tallies.values():
            all_reduce(tally.sums)
        nonfinite = int(all_reduce(self._nonfinite).item())
        if nonfinite:
            self.notes.append(f"{nonfinite} predictions are not finite; their figures are meaningless")
        heads = int(all_reduce(torch.tensor(len(self._heads), device=self._device), maximum=True).item())
        if heads:  # a rank without samples has not seen any heads, but takes part
            mine = torch.zeros(3, heads, heads, dtype=torch.float64) if self._differ is None else self._differ
            self._differ = all_reduce(mine.to(self._device))
            self._heads = self._heads or tuple(map(str, range(heads)))
        if not self._tallies[self.targets[0].label].count:
            raise UnsupportedInput("there are no samples to evaluate")

    def results(self) -> dict[str, Any]:
        """Return fields of `Evaluation`."""
        tallies = {name: tally for name, tally in self._tallies.items() if tally.count}
        classes = {target.label: target.classes for target in self.targets}
        found = None
        if self._differ is not None:
            argmax, divergence, count = self._differ.cpu()
            found = Disagreement(self._heads, argmax / count, divergence / count)
        return {**_results(tallies, classes), "disagreement": found}

    def _name(self, target: Target, head: str) -> str:
        return f"{target.label}.{head}" if target.task else head

    def _compare(self, heard: dict[str, Tensor], count: int) -> None:
        try:
            found = disagreement(heard)
        except UnsupportedInput as error:  # not finite
            self.notes = [f"disagreement: {error}"]
            return
        self._heads = found.heads
        number = torch.full_like(found.argmax, count)
        sums = torch.stack([found.argmax * count, found.divergence * count, number])
        self._differ = sums if self._differ is None else self._differ + sums


class NeighborMetrics:
    """Leave-one-out k-NN classification of the evaluated samples, for models without heads.

    Nothing is fitted, so the accuracy is about the features alone. It grows with the number of samples: compare models
    on the same data.
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
        heard.clear()
        if output.logits is None:  # else pooled features
            raise UnsupportedInput("nothing to evaluate: the model has neither heads nor pooled features")
        self._features.append(output.logits.float())
        self._labels.append(labels)
        self.seen += len(labels)

    def reduce(self) -> None:
        mine = (torch.cat(self._features), torch.cat(self._labels)) if self.seen else None
        rank, world_size = rank_and_world_size()
        every = [mine]
        if world_size > 1:
            every = all_gather(None if mine is None else tuple(part.cpu() for part in mine))
        parts = [part for part in every if part is not None]
        if sum(len(part[0]) for part in parts) < 2:
            raise UnsupportedInput("k-NN evaluation needs at least two samples")
        if mine is not None:
            features, labels = mine
            before = sum(len(part[0]) for part in every[:rank] if part is not None)
            own = torch.arange(before, before + len(features), device=features.device)
            memory, known = (torch.cat([part[i].to(features.device) for part in parts]) for i in (0, 1))
            for column, (name, tally) in enumerate(self._tallies.items()):
                for x, y, at in zip(*(part.split(1024) for part in (features, labels, own)), strict=True):
                    votes = neighbor_logits(memory, known[:, column], x, len(self._classes[name]), NEIGHBORS, own=at)
                    tally.add(votes, y[:, column])
        for tally in self._tallies.values():
            all_reduce(tally.sums)

    def results(self) -> dict[str, Any]:
        return _results(self._tallies, self._classes)


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


def _results(tallies: Mapping[str, Tally], classes: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    main = {name: tallies[name] for name in classes}
    return {
        "count": next(iter(main.values())).count,
        "accuracy": {name: tally.accuracy for name, tally in tallies.items()},
        "right": {name: tally.right for name, tally in tallies.items()},
        "top5": {name: tally.top5 for name, tally in main.items()},
        "loss": sum(tally.loss for tally in main.values()) / len(main),
        "calibration": {name: tally.calibration for name, tally in main.items()},
        "confusion": {name: tally.confusion for name, tally in main.items()},
        "classes": dict(classes),
    }
