"""Evaluation on a Ray cluster: every actor counts the predictions of some shards, and the counts add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail.data.dataset import Dataset
from vitrail.data.labels.targets import TargetSpec
from vitrail.data.loading.loader import make_loader
from vitrail.data.spec import InputSpec
from vitrail.embedding.output import rows_of
from vitrail.embedding.ray_engine import Task, map_shards, on_device, portable
from vitrail.errors import ImageError
from vitrail.surgery.recording import evaluating
from vitrail.training.data import prepares
from vitrail.training.evaluation.evaluator import count_predictions, merged_as
from vitrail.training.evaluation.metrics import Metrics, make_metrics
from vitrail.training.evaluation.result import Evaluation

ROWS = 2048
"""Samples in a shard; its images are in memory together."""


@dataclass(frozen=True)
class Counter:
    """Makes the task of an actor: the metrics of one shard, not yet reduced, and how many samples are unreadable."""

    model: nn.Module
    dataset: Dataset
    expects: InputSpec
    known: Mapping[str, Sequence[str]] | None
    targets: Mapping[str, TargetSpec] | None
    merge: Mapping[str, Any] | None
    batch: int
    dtype: torch.dtype | None
    rows: int

    def __call__(self) -> Task:
        model = on_device(self.model)
        device = next(model.parameters()).device

        def work(shard: int) -> tuple[Metrics | None, int]:
            part = self.dataset.select(rows_of(shard, self.rows, len(self.dataset)))
            size = self.expects.size[0] if self.expects.size else 1
            try:
                loader = make_loader(part, image_size=size, device=device, keep="device", max_unreadable=1.0)
                metrics = make_metrics(model, loader.classes, torch.device("cpu"), self.known, self.targets)
                with merged_as(model, self.merge), evaluating(model):
                    for _ in count_predictions(
                        model, metrics, loader, batch=self.batch, prepare=prepares(self.expects).plain, dtype=self.dtype
                    ):
                        pass
            except ImageError:  # nothing in this shard can be read
                return None, len(part)
            return metrics, len(loader.skipped)

        return work


def evaluate_shards(
    model: nn.Module,
    dataset: Dataset,
    expects: InputSpec,
    known: Mapping[str, Sequence[str]] | None,
    targets: Mapping[str, TargetSpec] | None,
    merge: Mapping[str, Any] | None,
    batch: int,
    dtype: torch.dtype | None,
    max_unreadable: float,
    progress: Callable[[int], None],
    address: str | None,
    actors: int | None,
) -> Evaluation:
    """Evaluate a model on a cluster; see `vitrail.training.evaluate`."""
    make = Counter(portable(model), dataset, expects, known, targets, merge, batch, dtype, ROWS)
    parts: dict[int, Metrics] = {}
    skipped = done = 0
    for shard, (metrics, unreadable) in map_shards(
        make, range(-(-len(dataset) // ROWS)), address=address, actors=actors
    ):
        done += len(rows_of(shard, ROWS, len(dataset)))
        skipped += unreadable
        if metrics is not None:
            parts[shard] = metrics
        progress(done)
    if skipped > max_unreadable * len(dataset) or not parts:
        raise ImageError(
            f"{skipped} of {len(dataset)} images cannot be read, and max_unreadable allows a share of "
            f"{max_unreadable:g}. Repair or remove them, or allow more"
        )
    total, *others = (parts[shard] for shard in sorted(parts))
    for one in others:
        total.merge(one)
    total.reduce()
    with merged_as(model, merge) as settings:
        pass
    return Evaluation(
        **{**total.results(), "notes": tuple(total.notes)},
        batch=batch,
        device="ray",
        dtype=str(dtype or next(model.parameters()).dtype).removeprefix("torch."),
        merge=settings,
    )
