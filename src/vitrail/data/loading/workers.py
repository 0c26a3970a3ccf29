"""A data loader that decodes samples again for each step, in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitrail.data.dataset import Dataset
from vitrail.data.loading.loader import LoadedBatch, Loader, to_device
from vitrail.errors import ImageError, TrainingError


class _Read(NamedTuple):
    """What a worker read: images, their indices, and the samples that could not be read."""

    images: Tensor
    indices: Tensor
    faults: list[tuple[int, str]]


class WorkerLoader(Loader):
    """Samples read on demand, some steps ahead; any step may be the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next = -1
        self._batches: Iterator[_Read] = iter(())

    def batch(self, step: int) -> LoadedBatch:
        if step != self._next:
            self._step_indices(step)  # raise an error here, not in a worker
            assert self.order is not None
            indices = partial(self.order.indices, rank=self.rank, world_size=self.world_size)
            self._batches = iter(self._loader(map(indices, count(step)), replace=True))
        self._next = -1  # until the batch is there
        try:
            read = next(self._batches)
        except (RuntimeError, EOFError, OSError) as error:
            if not self.workers:
                raise
            self.close()
            raise TrainingError(
                f"a data loader's worker ended, or could not send its images ({error or type(error).__name__}); "
                "if memory is short, use fewer workers or a smaller batch"
            ) from error
        self._next = step + 1
        return self._at(read)

    def sweep(self, batch: int) -> Iterator[LoadedBatch]:
        made = map(self._at, self._loader(self._sweep_indices(batch), replace=False))
        return (one for one in made if len(one.indices))

    def close(self) -> None:
        self._batches, self._next = iter(()), -1

    def _at(self, read: _Read) -> LoadedBatch:
        for index, reason in read.faults:
            if index not in self._unreadable:
                self._add_unreadable(index, reason)
        images = read.images.to(self.device, non_blocking=True)
        labels = self.dataset.labels[read.indices]
        return LoadedBatch(images, to_device(labels, self.device), to_device(read.indices, self.device))

    def _loader(self, parts: Any, *, replace: bool) -> DataLoader[_Read]:
        several: dict[str, Any] = {}
        if self.workers:
            # A clean process: the parent may hold a device and threads.
            clean = "forkserver" if "forkserver" in torch.multiprocessing.get_all_start_methods() else "spawn"
            several = {"prefetch_factor": 2, "multiprocessing_context": clean}
        return DataLoader(
            _Reader(self.dataset.bare(), self.image_size, replace),  # type: ignore[arg-type]
            batch_size=None,
            sampler=parts,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            **several,
        )


@dataclass(frozen=True)
class _Reader:
    """Reads the samples of one batch; runs in a worker."""

    dataset: Dataset
    image_size: int
    replace: bool

    def __getitem__(self, indices: Tensor) -> _Read:
        """Read a batch in rising order, which is faster in some files, and return it in the given order."""
        found: dict[int, Tensor] = {}
        replacements: dict[int, int] = {}
        faults: dict[int, str] = {}
        for index in indices.unique().tolist():
            place = index
            for _ in range(len(self.dataset) if self.replace else 1):
                if place not in found and place not in faults:
                    try:
                        found[place] = self.dataset.tensor(place, self.image_size)
                    except ImageError as error:
                        faults[place] = str(error)
                if place in found:
                    replacements[index] = place
                    break
                place = (place + 1) % len(self.dataset)
        places = [replacements[index] for index in indices.tolist() if index in replacements]
        images = [found[place] for place in places]
        spec = self.dataset.spec_at(self.image_size)
        empty = torch.empty(0, *spec.shape, dtype=spec.dtype)
        return _Read(torch.stack(images) if images else empty, torch.tensor(places).long(), sorted(faults.items()))
