"""Pictures read again for each step, by processes beside the one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitrail.data.dataset import Examples
from vitrail.data.loading.loader import Batch, KnownFeed, Share, Unreadable
from vitrail.data.loading.memory import default_workers, to_device
from vitrail.errors import ImageError, TrainingError


class _Read(NamedTuple):
    """What a worker read: pictures, which examples they are, and what could not be read."""

    images: Tensor
    indices: Tensor
    faults: list[tuple[int, str]]


class WorkerFeed(KnownFeed):
    """Examples that are read when they are wanted, some steps ahead; any step may be the first."""

    def __init__(
        self,
        examples: Examples,
        share: Share,
        side: int,
        device: torch.device,
        unreadable: Unreadable,
        workers: int | None = None,
    ) -> None:
        super().__init__(examples, share, side, device, unreadable)
        self._examples = examples
        self._workers = default_workers() if workers is None else workers
        self._next = -1
        self._batches: Iterator[_Read] = iter(())

    def batch(self, step: int) -> Batch:
        """Give this process's part of a step's batch; steps one after the other are read ahead."""
        if step != self._next:
            self._share.step(step)  # an error is raised here and not among the workers
            self._batches = iter(self._loader(_Steps(self._share, step), replace=True))
        self._next = -1  # until the batch is there
        try:
            read = next(self._batches)
        except (RuntimeError, EOFError, OSError) as error:
            if not self._workers:
                raise
            self.close()
            raise TrainingError(
                f"A process that reads pictures ended, or could not hand them over ({error or type(error).__name__}). "
                "Where memory is short, use fewer workers or a smaller batch."
            ) from error
        self._next = step + 1
        return self._at(read)

    def sweep(self, batch: int) -> Iterator[Batch]:
        """Give every readable example once, in order: those of this process, so many at a time."""
        for read in self._loader(self._share.every(batch), replace=False):
            made = self._at(read)
            if len(made.indices):
                yield made

    def close(self) -> None:
        """Let the workers go."""
        self._batches, self._next = iter(()), -1

    def _at(self, read: _Read) -> Batch:
        for index, reason in read.faults:
            if index not in self._unreadable:
                self._unreadable.add(index, reason)
        images = read.images.to(self._device, non_blocking=True)
        labels = self._examples.labels[read.indices]
        return Batch(images, to_device(labels, self._device), to_device(read.indices, self._device))

    def _loader(self, parts: Any, *, replace: bool) -> DataLoader[_Read]:
        several: dict[str, Any] = {}
        if self._workers:
            several = {"prefetch_factor": 2, "multiprocessing_context": _context()}
        return DataLoader(
            _Reader(self._examples.bare(), self.side, replace),  # type: ignore[arg-type]
            batch_size=None,
            sampler=parts,
            num_workers=self._workers,
            pin_memory=self._device.type == "cuda",
            **several,
        )


class _Steps:
    """The indices of one step after the other, from a step on, without an end."""

    def __init__(self, share: Share, start: int) -> None:
        self._share = share
        self._start = start

    def __iter__(self) -> Iterator[Tensor]:
        step = self._start
        while True:
            yield self._share.step(step)
            step += 1


class _Reader:
    """What runs in a worker: reads the pictures of one batch."""

    def __init__(self, examples: Examples, side: int, replace: bool) -> None:
        self._examples = examples
        self._side = side
        self._replace = replace

    def __getitem__(self, indices: Tensor) -> _Read:
        """Read a batch in rising order, which is quicker in some files, and give it in the order that was asked for."""
        found: dict[int, Tensor] = {}
        stands: dict[int, int] = {}
        faults: dict[int, str] = {}
        for index in indices.unique().tolist():
            place = index
            for _ in range(len(self._examples) if self._replace else 1):
                if place not in found and place not in faults:
                    try:
                        found[place] = self._examples.read(place, self._side)
                    except ImageError as error:
                        faults[place] = str(error)
                if place in found:
                    stands[index] = place
                    break
                place = (place + 1) % len(self._examples)
        places = [stands[index] for index in indices.tolist() if index in stands]
        images = [found[place] for place in places]
        form = self._examples.form(self._side)
        empty = torch.empty(0, *form.shape, dtype=form.dtype)
        return _Read(torch.stack(images) if images else empty, torch.tensor(places).long(), sorted(faults.items()))


def _context() -> str:
    """Workers start from a clean process: one that trains may hold a device, and threads."""
    return "forkserver" if "forkserver" in torch.multiprocessing.get_all_start_methods() else "spawn"
