"""A data loader that keeps all samples in the device's memory, decoded once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vitrail.data.dataset import Dataset, Decode
from vitrail.data.loading.loader import LoadedBatch, Loader, Progress, Shard, Unreadable, to_device
from vitrail.errors import ImageError

CHUNK = 512
"""Images copied to the device at a time, and decoded ahead at most."""


class InMemoryLoader(Loader):
    """Samples on the device; a batch is one lookup."""

    def __init__(
        self,
        dataset: Dataset,
        shard: Shard,
        image_size: int,
        device: torch.device,
        unreadable: Unreadable,
        workers: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(dataset, shard, image_size, device, unreadable)
        self._labels = dataset.labels.to(device)
        self._images = torch.empty(self.count, *self._spec.shape, dtype=self._spec.dtype, device=device)
        self._fill(workers, progress)
        self._places = self._replacements()

    def batch(self, step: int) -> LoadedBatch:
        return self._at(self._places[self._shard.step(step)])

    def sweep(self, batch: int) -> Iterator[LoadedBatch]:
        for indices in self._shard.sweep(batch):
            readable = indices[self._places[indices] == indices]
            if len(readable):
                yield self._at(readable)

    def close(self) -> None:
        self._images = self._images.new_empty(0, *self._spec.shape)  # a slice would keep the whole storage

    def _at(self, indices: Tensor) -> LoadedBatch:
        there = to_device(indices, self._device)
        return LoadedBatch(self._images[there], self._labels[there], there)

    def _fill(self, workers: int, progress: Progress | None) -> None:
        """Decode all samples and copy them to the device, a chunk at a time."""
        chunk = torch.empty(min(CHUNK, self.count), *self._spec.shape, dtype=self._spec.dtype)
        start = 0
        for index, image in decoded(self._dataset, self.image_size, workers):
            if isinstance(image, ImageError):
                self._unreadable.add(index, str(image))
                chunk[index - start] = 0
            else:
                chunk[index - start] = image
            if index + 1 == min(start + len(chunk), self.count):
                self._images[start : index + 1] = chunk[: index + 1 - start].to(self._device)
                start = index + 1
                if progress is not None:
                    progress(start, self.count)

    def _replacements(self) -> Tensor:
        """Return for each sample the one that replaces it: itself, or the next that can be read."""
        places = torch.arange(self.count)
        for index in range(2 * self.count - 1, -1, -1) if len(self._unreadable) else ():
            if index % self.count in self._unreadable:
                places[index % self.count] = places[(index + 1) % self.count]
        return places


def decoded(dataset: Dataset, image_size: int, workers: int) -> Iterator[tuple[int, Tensor | ImageError]]:
    """Yield all samples in order: bytes are read in this thread, decoded ahead in others; errors take their places."""
    if workers < 1:
        for index in range(len(dataset)):
            yield index, _decode(_fetch(dataset, index, image_size))
        return
    ahead: deque[tuple[int, Future[Tensor | ImageError]]] = deque()
    # Decoding changes warning filters, which are not thread-safe: restore them at the end.
    with warnings.catch_warnings(), ThreadPoolExecutor(workers, "vitrail-decode") as pool:
        try:
            for index in range(len(dataset)):
                while len(ahead) >= CHUNK:
                    number, future = ahead.popleft()
                    yield number, future.result()
                ahead.append((index, pool.submit(_decode, _fetch(dataset, index, image_size))))
            for number, future in ahead:
                yield number, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _fetch(dataset: Dataset, index: int, image_size: int) -> Decode | ImageError:
    try:
        return dataset.fetch(index, image_size)
    except ImageError as error:
        return error


def _decode(fetched: Decode | ImageError) -> Tensor | ImageError:
    if isinstance(fetched, ImageError):
        return fetched
    try:
        return fetched()
    except ImageError as error:
        return error
