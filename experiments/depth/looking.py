"""What is noted about a run: how its loss fell, and how tokens and gradients grow over the layers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from experiments.common.scoring import batches
from experiments.common.study import Trained
from vitrail.models import ViT
from vitrail.training import Run, read_log


def look(run: Run, trained: Trained) -> dict[str, Any]:
    """Note how training went, and how tokens and gradients grow over the layers, at the start and at the end.

    All of it on training pictures. The model of the start is a fresh one of the same shape.
    """
    losses = [line["losses"]["loss"] for line in read_log(run.folder / "log.jsonl", "epoch")]
    model = trained.model
    assert isinstance(model, ViT)
    images, truth = next(batches(model, trained.labels, trained.data.watched(128)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = ViT(model.config).to(images.device).eval()
    return {
        "losses": losses,
        "rise": largest_rise(losses),
        "start": by_layer(fresh, images, truth[:, 0]),
        "end": by_layer(model, images, truth[:, 0]),
        "flops": vitrail.count(model).flops,
    }


def by_layer(model: ViT, images: Tensor, truth: Tensor) -> dict[str, list[float]]:
    """Give, after each block, the mean length of a token, and the length of the loss's gradient for one picture."""
    left: list[Tensor] = []
    handles = [block.register_forward_hook(lambda _, __, x: left.append(x)) for block in model.blocks]
    try:
        said = model(images)
    finally:
        for handle in handles:
            handle.remove()
    assert isinstance(said, Tensor)
    gradients = torch.autograd.grad(F.cross_entropy(said, truth, reduction="sum"), left)
    return {
        "tokens": [x.detach().norm(dim=-1).mean().item() for x in left],
        "gradients": [x.flatten(1).norm(dim=1).mean().item() for x in gradients],
    }


def largest_rise(losses: list[float]) -> float:
    """Say how far the loss of an epoch was above the best one before it; 0 where it only ever fell.

    >>> largest_rise([2.0, 1.5, 1.75, 1.0])
    0.25
    """
    return max(loss - best for loss, best in zip(losses, accumulate(losses, min), strict=True))


def growth(row: Mapping[str, Any], when: str, what: str) -> float:
    """Give the ratio of the last layer to the first."""
    values = row[when][what]
    return float(values[-1] / values[0])
