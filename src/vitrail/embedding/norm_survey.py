"""``survey_norms``: the norms of all tokens of a dataset of any size, and whether there are artifacts among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail._arguments import checked
from vitrail._checks import check_choice, check_int
from vitrail.adapters import find
from vitrail.analysis.norms import NormAccumulator, Norms
from vitrail.data.batches import Batches
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.embedding.output import rows_of
from vitrail.embedding.ray_engine import Task, map_shards, on_device, portable
from vitrail.embedding.run import BATCH, ENGINES
from vitrail.errors import ImageError
from vitrail.surgery.recording import stream

ROWS = 2048
"""Samples in a shard."""


@dataclass(frozen=True)
class NormCounter:
    """Makes the task of an actor: the counts of one shard; None if nothing in it can be read."""

    model: nn.Module
    dataset: Dataset
    batch: int
    rows: int

    def __call__(self) -> Task:
        model = on_device(self.model)
        return lambda shard: count_norms(model, self.dataset, rows_of(shard, self.rows, len(self.dataset)), self.batch)


def count_norms(model: nn.Module, dataset: Dataset, indices: range, batch: int) -> NormAccumulator | None:
    """Count the norms of some samples; None if none of them can be read."""
    counts = NormAccumulator(len(find(model).blocks))
    spec = find(model).adapter.input_spec(find(model).trunk)
    try:
        for piece in dataset.batches(spec, batch, indices=indices):
            for seen in stream(model, piece.images, "norms", device="cpu"):
                norms = torch.stack([seen.norms[layer][:, seen.layout.patches] for layer in seen.layers])
                counts.add(norms, piece.indices)
    except ImageError:
        return None
    return counts


@checked
def survey_norms(
    model: nn.Module,
    data: Any,
    *,
    batch: int | None = None,
    limit: int | None = None,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Norms:
    """Count the norms of the patches of every image, in memory of fixed size, and decide whether there are artifacts.

    That is the first part of `vitrail.inspect`, for data of any size. Counts of several workers add up exactly: the
    result does not depend on their number.

    Args:
        model: a supported model.
        data: as for `vitrail.embed`.
        batch, limit: batch size, and most samples.
        engine, address, actors: as for `vitrail.embed`.
        progress: called with the number of samples done, and the total.
    """
    check_choice("engine", engine, ENGINES)
    if batch is not None:
        check_int("batch", batch)
    find(model)  # a supported one, before the data is read
    dataset = open_dataset(data.data if isinstance(data, Batches) else data, labels=None, limit=limit)
    batch = batch or BATCH[next(model.parameters()).device.type]
    total = len(dataset)
    shards = range(-(-total // ROWS))
    make = NormCounter(portable(model) if engine == "ray" else model, dataset, batch, ROWS)
    found: dict[int, NormAccumulator] = {}
    done = 0
    local = ((shard, count_norms(model, dataset, rows_of(shard, ROWS, total), batch)) for shard in shards)
    for shard, counts in local if engine == "local" else map_shards(make, shards, address=address, actors=actors):
        if counts is not None:
            found[shard] = counts
        done += len(rows_of(shard, ROWS, total))
        if progress is not None:
            progress(done, total)
    if not found:
        raise ImageError(f"none of the {total} images could be read")
    first, *others = (found[shard] for shard in sorted(found))
    for one in others:
        first.merge(one)
    return first.result()
