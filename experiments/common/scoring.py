"""Data as a trained model expects it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data import open_dataset
from vitrail.data.loading.loader import make_loader
from vitrail.data.sources.base import LABEL
from vitrail.training import Labels
from vitrail.training.input_size import prepares


def batches(model: nn.Module, labels: Labels, data: Any, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Give samples as a trained model expects them, where it is and in its dtype, with their classes (B, T)."""
    expects = labels.preprocessing
    assert expects is not None, "a trained model says what it expects"
    columns = () if list(labels.classes) == [LABEL] else tuple(labels.classes)
    examples = open_dataset(data, labels=columns, classes=labels.classes, labeled=True)
    weight = next(model.parameters())
    feed = make_loader(examples, image_size=expects.size[0] if expects.size else 1, device=weight.device)
    prepare = prepares(expects).plain
    try:
        for samples, truth, _ in feed.sweep(batch):
            yield prepare(samples).to(weight.dtype), truth
    finally:
        feed.close()


def inputs(model: nn.Module, labels: Labels, data: Any) -> Tensor:
    """Give all samples of some data as a trained model expects them, where it is."""
    return torch.cat([x for x, _ in batches(model, labels, data)])
