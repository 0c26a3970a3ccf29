"""Preprocessed batches for a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data import open_dataset
from vitrail.data.loading.loader import make_loader
from vitrail.data.sources.base import LABEL
from vitrail.training import Labels
from vitrail.training.data import prepares


def batches(model: nn.Module, labels: Labels, data: Any, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield preprocessed samples on the model's device and in its dtype, with their classes (B, T)."""
    spec = labels.preprocessing
    assert spec is not None, "a trained model has an input specification"
    columns = () if list(labels.classes) == [LABEL] else tuple(labels.classes)
    examples = open_dataset(data, labels=columns, classes=labels.classes, labeled=True)
    weight = next(model.parameters())
    loader = make_loader(examples, image_size=spec.size[0] if spec.size else 1, device=weight.device)
    prepare = prepares(spec).plain
    try:
        for samples, targets, _ in loader.sweep(batch):
            yield prepare(samples).to(weight.dtype), targets
    finally:
        loader.close()


def all_inputs(model: nn.Module, labels: Labels, data: Any) -> Tensor:
    """Return all samples of a dataset, preprocessed and on the model's device."""
    return torch.cat([x for x, _ in batches(model, labels, data)])
