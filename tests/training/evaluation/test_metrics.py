"""Counts against loops and against scikit-learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitrail.training.evaluation.metrics import neighbor_logits
from vitrail.training.evaluation.tallies import BINS, ClassTally, all_reduce


def filled(classes: int = 7, batches: int = 3) -> tuple[ClassTally, torch.Tensor, torch.Tensor]:
    tally, logits, labels = ClassTally(classes), torch.randn(60, classes) * 2, torch.randint(classes, (60,))
    for part in range(batches):
        rows = slice(part * 60 // batches, (part + 1) * 60 // batches)
        tally.add(logits[rows], labels[rows])
    return tally, logits, labels


def test_accuracy_loss_and_top_five() -> None:
    tally, logits, labels = filled()
    order = logits.argsort(1, descending=True)
    assert tally.count == 60
    assert tally.figures()["accuracy"] == pytest.approx((order[:, 0] == labels).double().mean().item())
    assert tally.figures()["top5"] == pytest.approx((order[:, :5] == labels[:, None]).any(1).double().mean().item())
    assert tally.figures()["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_confusion_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    tally, logits, labels = filled()
    expected = metrics.confusion_matrix(labels.numpy(), logits.argmax(1).numpy(), labels=range(7))
    assert tally.figures()["confusion"].tolist() == expected.tolist()


def test_calibration_by_loop() -> None:
    tally, logits, labels = filled()
    groups: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        place = next(b for b in range(BINS) if confidence <= (b + 1) / BINS)
        groups.setdefault(place, []).append((confidence, row.index(confidence) == label))
    error = 0.0
    for group in groups.values():
        mean = sum(confidence for confidence, _ in group) / len(group)
        right = sum(hit for _, hit in group) / len(group)
        error += len(group) / 60 * abs(mean - right)
    assert tally.figures()["calibration"] == pytest.approx(error, abs=1e-6)


def test_batches_do_not_matter_and_few_classes_do_neither() -> None:
    torch.manual_seed(0)
    one = filled(batches=1)[0]
    torch.manual_seed(0)
    many = filled(batches=12)[0]
    torch.testing.assert_close(one.sums, many.sums)
    pair = ClassTally(2)
    pair.add(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert (pair.figures()["accuracy"], pair.figures()["top5"]) == (0.0, 1.0)


def test_sums_add_up_over_ranks() -> None:
    left, right = filled()[0], filled()[0]
    both = ClassTally(7)
    both.sums = left.sums + right.sums
    assert both.figures()["accuracy"] == pytest.approx((left.figures()["accuracy"] + right.figures()["accuracy"]) / 2)
    before = left.sums.clone()
    all_reduce(left.sums)  # alone, it changes nothing
    assert torch.equal(left.sums, before)


def test_neighbors_vote() -> None:
    memory, labels = torch.randn(30, 8, dtype=torch.float64), torch.randint(3, (30,))
    queries = torch.randn(5, 8, dtype=torch.float64)
    found = neighbor_logits(memory, labels, queries, 3, k=4, temperature=0.1)
    for row, x in zip(found, queries, strict=True):
        cosine = F.cosine_similarity(memory, x[None])
        near = cosine.argsort(descending=True)[:4]
        votes = torch.zeros(3, dtype=torch.float64)
        for index in near:
            votes[labels[index]] += (cosine[index] / 0.1).exp()
        torch.testing.assert_close(row.exp().double(), votes / votes.sum(), atol=1e-5, rtol=1e-4)
