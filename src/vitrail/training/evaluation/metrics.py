"""Counting right answers: sums over batches that several processes can add up, and what follows from them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail._distributed import ranks

BINS = 15
"""Bins of confidence for the calibration error."""


class Tally:
    """What one answer to one question did, over any number of pictures, in one vector of sums on the device.

    Nothing is read back from the device before :meth:`reduce` or a result is asked for, and what several processes
    counted is the sum of their vectors.

    >>> tally = Tally(3)
    >>> tally.add(torch.tensor([[2.0, 0, 0], [0, 2.0, 0]]), torch.tensor([0, 2]))
    >>> tally.accuracy, tally.confusion.tolist()
    (0.5, [[1, 0, 0], [0, 0, 0], [0, 1, 0]])
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # counts stay whole in both
        self.sums = torch.zeros(4 + 3 * BINS + classes**2, dtype=dtype, device=device)
        self._right: list[Tensor] = []

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits or log-probabilities (B, C), labels (B,)."""
        log_p = logits.float().log_softmax(-1).to(self.sums)
        confidence, said = log_p.max(-1)
        confidence = confidence.exp()
        self._right.append(said == labels)
        right = self._right[-1].to(self.sums)
        best = log_p.topk(min(5, self.classes), -1).indices
        among = (best == labels.unsqueeze(-1)).any(-1).to(self.sums)
        loss = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        self.sums[:4] += torch.stack([torch.ones_like(loss), right, among, loss]).sum(1)
        place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # bins are open below and closed above
        bins = self.sums[4 : 4 + 3 * BINS].view(3, BINS)
        bins.index_add_(1, place, torch.stack([torch.ones_like(loss), confidence, right]))
        self.sums[4 + 3 * BINS :].index_add_(0, labels * self.classes + said, torch.ones_like(loss))

    @property
    def right(self) -> Tensor:
        """Whether each answer was right (N,), in the order in which pictures came; of this process alone."""
        return torch.cat(self._right).cpu() if self._right else torch.zeros(0, dtype=torch.bool)

    @property
    def count(self) -> int:
        """Pictures seen."""
        return round(self.sums[0].item())

    @property
    def accuracy(self) -> float:
        """Share of pictures whose first answer is right."""
        return self._mean(1)

    @property
    def top5(self) -> float:
        """Share of pictures whose label is among the first five answers."""
        return self._mean(2)

    @property
    def loss(self) -> float:
        """Mean cross-entropy, without smoothing."""
        return self._mean(3)

    @property
    def calibration(self) -> float:
        """Expected calibration error: how far confidence is from accuracy, bin by bin, weighed by pictures."""
        count, confidence, right = self.sums[4 : 4 + 3 * BINS].view(3, BINS).double().cpu()
        return ((confidence - right).abs().sum() / count.sum()).item()

    @property
    def confusion(self) -> Tensor:
        """Pictures (C, C) by true class, in rows, and answer, in columns."""
        return self.sums[4 + 3 * BINS :].view(self.classes, self.classes).round().long().cpu()

    def _mean(self, place: int) -> float:
        return (self.sums[place] / self.sums[0]).item()


def reduce(sums: Tensor, *, most: bool = False) -> Tensor:
    """Add up a tensor over all processes, in place, or take the largest; with one process nothing happens."""
    if ranks()[1] > 1:
        dist.all_reduce(sums, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM)
    return sums


def neighbour_logits(
    memory: Tensor,
    labels: Tensor,
    asked: Tensor,
    classes: int,
    k: int = 20,
    temperature: float = 0.07,
    *,
    own: Tensor | None = None,
) -> Tensor:
    """Let the k nearest of known features (N, D) vote for the classes of others (B, D): log-probabilities (B, C).

    Neighbours are found by cosine, and vote with exp(cosine / temperature) (DINO's protocol). Where those asked are
    among the known ones, ``own`` (B,) says which they are: nobody has a vote about itself.
    """
    unit, known = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (asked, memory))
    alike = unit @ known.T
    if own is not None:
        alike.scatter_(1, own.unsqueeze(1), -torch.inf)
    near, which = alike.topk(min(k, len(known) - (own is not None)), -1)
    votes = torch.zeros(len(asked), classes, device=asked.device)
    votes.scatter_add_(1, labels[which], (near / temperature).softmax(-1))
    return votes.clamp(min=1e-9).log().log_softmax(-1)
