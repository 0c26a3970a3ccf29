"""A data loader that keeps all samples in the device's memory, decoded once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from vitrail.data.dataset import Dataset, Decode
from vitrail.data.loading.loader import LoadedBatch, Loader, to_device
from vitrail.errors import ImageError

CHUNK = 512
"""Images copied to the device at a time, and decoded ahead at most."""


class InMemoryLoader(Loader):
    """Samples on the device; a batch is one lookup."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._labels = self.dataset.labels.to(self.device)
        self._images = torch.empty(self.count, *self._spec.shape, dtype=self._spec.dtype, device=self.device)
        self._fill()
        self._places = torch.arange(self.count)  # for each sample itself, or the next that can be read
        for index in range(2 * self.count - 1, -1, -1) if self._unreadable else ():
            if index % self.count in self._unreadable:
                self._places[index % self.count] = self._places[(index + 1) % self.count]

    def batch(self, step: int) -> LoadedBatch:
        return self._at(self._places[self._step_indices(step)])

    def sweep(self, batch: int) -> Iterator[LoadedBatch]:
        for indices in self._sweep_indices(batch):
            readable = indices[self._places[indices] == indices]
            if len(readable):
                yield self._at(readable)

    def close(self) -> None:
        self._images = self._images.new_empty(0, *self._spec.shape)  # a slice would keep the whole storage

    def _at(self, indices: Tensor) -> LoadedBatch:
        there = to_device(indices, self.device)
        return LoadedBatch(self._images[there], self._labels[there], there)

    def _fill(self) -> None:
        """Decode all samples and copy them to the device, a chunk at a time."""
        chunk = torch.empty(min(CHUNK, self.count), *self._spec.shape, dtype=self._spec.dtype)
        start = 0
        for index, decode in enumerate(_decoders(self.dataset, self.image_size, self.workers)):
            try:
                chunk[index - start] = decode()
            except ImageError as error:
                self._add_unreadable(index, str(error))
                chunk[index - start] = 0
            if index + 1 == min(start + len(chunk), self.count):
                self._images[start : index + 1] = chunk[: index + 1 - start].to(self.device)
                start = index + 1
                if self.progress is not None:
                    self.progress(start, self.count)


def _decoders(dataset: Dataset, image_size: int, workers: int) -> Iterator[Decode]:
    """Yield a function for each sample that returns it: bytes are read in this thread, decoded ahead in others."""
    if workers < 1:
        for index in range(len(dataset)):
            yield partial(dataset.tensor, index, image_size)
        return
    ahead: deque[Future[Tensor]] = deque()
    # Decoding changes warning filters, which are not thread-safe: restore them at the end.
    with warnings.catch_warnings(), ThreadPoolExecutor(workers, "vitrail-decode") as pool:
        try:
            for index in range(len(dataset)):
                if len(ahead) >= CHUNK:
                    yield ahead.popleft().result
                try:
                    ahead.append(pool.submit(dataset.fetch(index, image_size)))
                except ImageError as error:
                    ahead.append(Future())
                    ahead[-1].set_exception(error)
            for future in ahead:
                yield future.result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
