"""All samples on the device, pictures decoded once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vitrail._distributed import cores
from vitrail.data.dataset import Examples
from vitrail.data.loading.loader import Batch, KnownFeed, Progress, Share, Unreadable
from vitrail.errors import ImageError

AT_ONCE = 512
"""Pictures that are copied to the device at once, and decoded ahead at most."""

MOST_WORKERS = 16


class ResidentFeed(KnownFeed):
    """Examples whose pictures are on the device; a batch is one lookup."""

    def __init__(
        self,
        examples: Examples,
        share: Share,
        side: int,
        device: torch.device,
        unreadable: Unreadable,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(examples, share, side, device, unreadable)
        self._labels = examples.labels.to(device)
        self._images = torch.empty(self.count, *self._form.shape, dtype=self._form.dtype, device=device)
        self._fill(examples, default_workers() if workers is None else workers, progress)
        self._places = self._replacements()

    def batch(self, step: int) -> Batch:
        """Give this process's part of a step's batch."""
        return self._at(self._places[self._share.step(step)])

    def sweep(self, batch: int) -> Iterator[Batch]:
        """Give every readable example once, in order: those of this process, so many at a time."""
        for indices in self._share.every(batch):
            readable = indices[self._places[indices] == indices]
            if len(readable):
                yield self._at(readable)

    def close(self) -> None:
        """Let go of the pictures."""
        self._images = self._images.new_empty(0, *self._form.shape)  # a slice would hold on to all of them

    def _at(self, indices: Tensor) -> Batch:
        there = to_device(indices, self._device)
        return Batch(self._images[there], self._labels[there], there)

    def _fill(self, examples: Examples, workers: int, progress: Progress | None) -> None:
        held = torch.empty(min(AT_ONCE, self.count), *self._form.shape, dtype=self._form.dtype)
        start = 0
        for index, picture in decoded(examples, self.side, workers):
            if isinstance(picture, ImageError):
                self._unreadable.add(index, str(picture))
                held[index - start] = 0
            else:
                held[index - start] = picture
            if index + 1 == min(start + len(held), self.count):
                self._images[start : index + 1] = held[: index + 1 - start].to(self._device)
                start = index + 1
                if progress is not None:
                    progress(start, self.count)

    def _replacements(self) -> Tensor:
        """Say for each example which one stands for it: itself, or the next that can be read."""
        places = torch.arange(self.count)
        for index in range(2 * self.count - 1, -1, -1) if len(self._unreadable) else ():
            if index % self.count in self._unreadable:
                places[index % self.count] = places[(index + 1) % self.count]
        return places


def decoded(examples: Examples, side: int, workers: int) -> Iterator[tuple[int, Tensor | ImageError]]:
    """Read all examples in order: bytes in this thread, and some ahead decoded in others; errors take their places."""
    if workers < 1:
        for index in range(len(examples)):
            yield index, _tried(lambda index=index: examples.read(index, side))  # type: ignore[misc]
        return
    ahead: deque[tuple[int, Future[Tensor | ImageError]]] = deque()
    # Decoding changes what is warned about, which is no thread's own: in the end it is as it was before.
    with warnings.catch_warnings(), ThreadPoolExecutor(workers, "vitrail-decode") as pool:
        try:
            for index in range(len(examples)):
                while len(ahead) >= AT_ONCE:
                    number, future = ahead.popleft()
                    yield number, future.result()
                ahead.append((index, pool.submit(_tried, _started(examples, index, side))))
            for number, future in ahead:
                yield number, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """Give one worker for each core that this process may use."""
    return min(cores(), MOST_WORKERS)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _started(examples: Examples, index: int, side: int) -> Callable[[], Tensor]:
    try:
        return examples.fetch(index, side)
    except ImageError as error:
        return _Raise(error)


class _Raise:
    def __init__(self, error: ImageError) -> None:
        self._error = error

    def __call__(self) -> Tensor:
        raise self._error


def _tried(read: Callable[[], Tensor]) -> Tensor | ImageError:
    try:
        return read()
    except ImageError as error:
        return error
