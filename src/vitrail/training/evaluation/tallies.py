"""Tallies: figures of one prediction, summed over batches and ranks, by what it predicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail._distributed import all_gather, rank_and_world_size
from vitrail.data.sample import UNKNOWN
from vitrail.training.objective.targets import Target

BINS = 15
"""Confidence bins of the calibration error."""


def all_reduce(values: Tensor, *, maximum: bool = False) -> Tensor:
    """Sum a tensor over all ranks in place, or take its maximum; do nothing with one rank."""
    if rank_and_world_size()[1] > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
    return values


class Tally(ABC):
    """Figures of one prediction. Nothing is copied from the device before a result is read."""

    @abstractmethod
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch: the model's outputs, and what is true."""

    @abstractmethod
    def reduce(self) -> None:
        """Add up over ranks; every rank must call it."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add what the same tally of another process has counted, of samples that follow."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of samples."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Return figures by the names of `Evaluation`'s fields, and ``loss``."""


def make_tally(target: Target, device: torch.device | str = "cpu") -> Tally:
    """Return the tally of a target's predictions."""
    if target.kind in VALUES:
        return VALUES[target.kind](target, device)
    kinds: dict[str, Callable[..., Tally]] = {
        "classification": ClassTally,
        "multilabel": SeveralTally,
        "dense": PixelTally,
    }
    return kinds[target.kind](len(target.classes), device)


def _precise(device: torch.device | str) -> torch.dtype:
    """Return the dtype of sums, which represents counts exactly."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


class ClassTally(Tally):
    """Accuracy, loss, calibration and confusion of one prediction, as one vector of sums on the device.

    Nothing is copied from the device before a result is read. The vectors of several ranks add up.

    >>> tally = ClassTally(3)
    >>> tally.add(torch.tensor([[2.0, 0, 0], [0, 2.0, 0]]), torch.tensor([0, 2]))
    >>> tally.figures()["accuracy"], tally.figures()["confusion"].tolist()
    (0.5, [[1, 0, 0], [0, 0, 0], [0, 1, 0]])
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.sums = torch.zeros(4 + 3 * BINS + classes**2, dtype=_precise(device), device=device)
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

    def reduce(self) -> None:
        all_reduce(self.sums)

    def merge(self, other: ClassTally) -> None:
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


class ValueTally(Tally):
    """Errors of the values of a regression, in the units of the labels.

    Sums are of values less the training mean, so that large values lose no digits.
    """

    def __init__(self, target: Target, device: torch.device | str = "cpu") -> None:
        self._target = target
        self.sums = torch.zeros(7, dtype=_precise(device), device=device)

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch: outputs and standardized values, (B, 1) each."""
        std = self._target.spec.std
        predicted, true = (values.to(self.sums)[:, 0] * std for values in (outputs, labels))
        error = predicted - true
        sums = (torch.ones_like(error), error.square(), error.abs(), true, true.square(), (error / std).square())
        self.sums[:6] += torch.stack(sums).sum(1)
        self.sums[6] += len(outputs)

    def reduce(self) -> None:
        all_reduce(self.sums)

    def merge(self, other: ValueTally) -> None:
        self.sums += other.sums.to(self.sums)

    @property
    def count(self) -> int:
        return round(self.sums[6].item())

    def figures(self) -> dict[str, Any]:
        """Return the root mean squared error, the mean absolute error, and R².

        R² is 1 for a perfect prediction, 0 for that of the mean of these samples, and None where they are all equal.
        """
        count, squared, absolute, total, squares, loss = self.sums[:6].double().tolist()
        count = max(count, 1)  # of depth maps no pixel may be known
        spread = squares - total**2 / count
        return {
            "rmse": (squared / count) ** 0.5,
            "mae": absolute / count,
            "r2": 1 - squared / spread if spread > 1e-12 * max(squares, 1e-300) else None,
            "loss": loss / count,
        }


class DepthTally(ValueTally):
    """Errors of the known pixels of depth maps, in the units of the depths."""

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch: maps (B, 1, H, W), and standardized depths (B, H, W), NaN being unknown."""
        known = ~labels.isnan()
        super().add(outputs[:, 0][known].unsqueeze(1), labels[known].unsqueeze(1))
        self.sums[6] += len(outputs) - known.sum()  # samples, not pixels


VALUES: dict[str, type[ValueTally]] = {"regression": ValueTally, "depth": DepthTally}
"""Tallies of numbers, by what a column holds."""


class SeveralTally(Tally):
    """Average precision of each class of a multi-label prediction. Keeps the scores of all samples."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self._batches: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch: logits and labels of 0 or 1, (B, K) each."""
        self._batches.append((outputs.float().cpu(), labels.bool().cpu()))

    def reduce(self) -> None:
        if rank_and_world_size()[1] > 1:
            self._batches = [batch for part in all_gather(self._batches) for batch in part]

    def merge(self, other: SeveralTally) -> None:
        self._batches += other._batches

    @property
    def count(self) -> int:
        return sum(len(labels) for _, labels in self._batches)

    def figures(self) -> dict[str, Any]:
        """Return the mean average precision over classes that occur, that of each class, and the binary accuracy."""
        logits, labels = (torch.cat(part) for part in zip(*self._batches, strict=True))
        each = [average_precision(logits[:, place], labels[:, place]) for place in range(self.classes)]
        known = [value for value in each if value is not None]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
        return {
            "mean_ap": sum(known) / len(known) if known else None,
            "ap": tuple(each),
            "accuracy": ((logits > 0) == labels).double().mean().item(),
            "loss": loss.item(),
        }


class PixelTally(Tally):
    """Confusion of the pixels of masks."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.sums = torch.zeros(2 + classes**2, dtype=_precise(device), device=device)

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch: a map of logits (B, K, H, W), and masks (B, H, W), 255 being unknown."""
        log_p = outputs.float().log_softmax(1)
        known = labels != UNKNOWN
        true = labels[known]
        loss = -log_p.gather(1, torch.where(known, labels, 0).unsqueeze(1)).squeeze(1)[known]
        places = true * self.classes + log_p.argmax(1)[known]
        self.sums[0] += len(labels)
        self.sums[1] += loss.sum().to(self.sums)
        self.sums[2:].index_add_(0, places, torch.ones_like(places, dtype=self.sums.dtype))

    def reduce(self) -> None:
        all_reduce(self.sums)

    def merge(self, other: PixelTally) -> None:
        self.sums += other.sums.to(self.sums)

    @property
    def count(self) -> int:
        return round(self.sums[0].item())

    def figures(self) -> dict[str, Any]:
        """Return the mean intersection over union of classes that occur, that of each class, and the pixel accuracy."""
        sums = self.sums.double().cpu()
        confusion = sums[2:].view(self.classes, self.classes)
        both = confusion.diagonal()
        either = confusion.sum(0) + confusion.sum(1) - both
        each = [None if not whole else (part / whole).item() for part, whole in zip(both, either, strict=True)]
        known = [value for value in each if value is not None]
        pixels = confusion.sum().clamp(min=1)
        return {
            "miou": sum(known) / len(known) if known else None,
            "iou": tuple(each),
            "accuracy": (both.sum() / pixels).item(),
            "loss": (sums[1] / pixels).item(),
            "confusion": confusion.round().long(),
        }


def average_precision(scores: Tensor, labels: Tensor) -> float | None:
    """Return the average precision of scores (N,) for labels (N,): the mean precision at each positive sample.

    Samples of equal scores share a threshold. None if there is no positive sample.

    >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))
    0.8333333333333333
    """
    order = scores.argsort(descending=True)
    positive = labels[order].double()
    if not positive.sum():
        return None
    ranked = scores[order]
    last = torch.ones(len(ranked), dtype=torch.bool)  # of its score
    last[:-1] = ranked[1:] != ranked[:-1]
    hits, seen = positive.cumsum(0)[last], (torch.arange(len(ranked)) + 1.0)[last].double()
    recalled = torch.diff(hits, prepend=hits.new_zeros(1)) / positive.sum()
    return float((hits / seen * recalled).sum())
