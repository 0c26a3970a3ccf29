"""Figures of values, several classes at once, and masks, against scikit-learn."""

import pytest
import torch

from vitrail.data.labels.targets import TargetSpec
from vitrail.training.evaluation.tallies import PixelTally, SeveralTally, ValueTally, average_precision
from vitrail.training.objective.targets import Target

sklearn = pytest.importorskip("sklearn.metrics")


def test_values() -> None:
    torch.manual_seed(0)
    spec = TargetSpec("regression", mean=1e4, std=3.0)
    tally = ValueTally(Target("age", slice(0, 1), ("age",), (), spec=spec))
    outputs, labels = torch.randn(50, 1), torch.randn(50, 1)
    for rows in torch.arange(50).split(7):
        tally.add(outputs[rows], labels[rows])
    predicted, true = ((values.double() * 3 + 1e4)[:, 0].numpy() for values in (outputs, labels))
    found = tally.figures()
    assert tally.count == 50
    assert found["rmse"] == pytest.approx(sklearn.root_mean_squared_error(true, predicted))
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(true, predicted))
    assert found["r2"] == pytest.approx(sklearn.r2_score(true, predicted))
    alone = ValueTally(Target("age", slice(0, 1), ("age",), (), spec=spec))
    alone.add(outputs[:1], labels[:1])
    assert alone.figures()["r2"] is None


def test_several_classes() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(60, 4).round(decimals=1), (torch.rand(60, 4) < 0.3).float()  # with equal scores
    labels[:, 3] = 0
    tally = SeveralTally(4)
    for rows in torch.arange(60).split(16):
        tally.add(logits[rows], labels[rows])
    found = tally.figures()
    each = [sklearn.average_precision_score(labels[:, k].numpy(), logits[:, k].numpy()) for k in range(3)]
    assert found["ap"] == (*(pytest.approx(value) for value in each), None)
    assert found["mean_ap"] == pytest.approx(sum(each) / 3)
    assert average_precision(torch.zeros(4), torch.tensor([True, False, False, False])) == 0.25  # chance


def test_pixels() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(6, 4, 5, 7), torch.randint(3, (6, 5, 7))
    masks[torch.rand(masks.shape) < 0.2] = 255
    logits[:, 3] = -9.0  # never predicted, and never true
    tally = PixelTally(4)
    for rows in torch.arange(6).split(4):
        tally.add(logits[rows], masks[rows])
    known = masks != 255
    predicted, true = logits.argmax(1)[known].numpy(), masks[known].numpy()
    found = tally.figures()
    each = sklearn.jaccard_score(true, predicted, average=None)
    assert found["iou"] == (*(pytest.approx(value) for value in each), None)
    assert found["miou"] == pytest.approx(each.mean())
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(true, predicted))
    loss = torch.nn.functional.cross_entropy(logits, masks, ignore_index=255)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
