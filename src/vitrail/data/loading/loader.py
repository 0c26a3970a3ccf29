"""What every data loader does: samples of any step, in a seeded order, and all samples once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail._distributed import cpu_count
from vitrail.data.dataset import Dataset
from vitrail.data.loading.order import Order
from vitrail.errors import ImageError, InvalidOption

Keep = Literal["auto", "device", "workers"]
Progress = Callable[[int, int], object]

DEVICE_SHARE = 0.4
"""Most of a device's free memory that a dataset takes with ``keep="auto"``."""

HOST_BYTES = 4 << 30
"""Most host memory that a dataset takes with ``keep="auto"``, in bytes."""

MAX_WORKERS = 16


class LoadedBatch(NamedTuple):
    """Samples on the device, before augmentation.

    Attributes:
        images: (b, 3, S, S) in uint8; arrays (b, C, ...) as they are.
        labels: (b, T) in int64, columns in the order of the loader's classes.
        indices: (b,) in int64: positions in the dataset.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Shard:
    """The samples that one of several processes sees."""

    order: Order | None
    count: int
    rank: int = 0
    world_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch; 0 without an order."""
        return 0 if self.order is None else self.order.steps_per_epoch

    def step(self, number: int) -> Tensor:
        """Return the indices of a step: this process's slice of the batch."""
        if self.order is None:
            raise InvalidOption("this loader has no batch size, and so no steps; make it with one")
        size = self.order.batch // self.world_size
        return self.order.indices(number)[self.rank * size : (self.rank + 1) * size]

    def sweep(self, batch: int) -> list[Tensor]:
        """Return all indices of this process in order, split into batches."""
        if batch < 1:
            raise InvalidOption(f"batch={batch}: expected 1 or more samples")
        return [part for part in torch.arange(self.count)[self.rank :: self.world_size].split(batch) if len(part)]


class Unreadable:
    """Samples that could not be read; more than a share of them is an error."""

    def __init__(self, dataset: Dataset, limit: float) -> None:
        if not 0 <= limit <= 1:
            raise InvalidOption(f"max_unreadable={limit}: expected a share from 0 to 1")
        self._dataset = dataset
        self._limit = limit
        self._found: dict[int, str] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __len__(self) -> int:
        return len(self._found)

    @property
    def named(self) -> list[tuple[str, str]]:
        """Names and reasons, in order."""
        return [(self._dataset.name(index), reason) for index, reason in sorted(self._found.items())]

    def add(self, index: int, reason: str) -> None:
        """Count a sample.

        Raises:
            ImageError: there are more than the limit allows, or no sample is left.
        """
        self._found[index] = reason
        count = len(self._dataset)
        if len(self._found) > self._limit * count or len(self._found) == count:
            shown = "\n".join(f"  {reason}" for _, reason in self.named[:5])
            raise ImageError(
                f"{len(self._found)} of {count} images cannot be read, and max_unreadable allows a share of "
                f"{self._limit:g}:\n{shown}\nRepair or remove them, or allow more."
            )


class Loader(ABC):
    """Loads the samples of any step, and all of them in order.

    A sample that cannot be read is replaced in steps by the next one that can be, and left out of a sweep.

    Attributes:
        classes: names of the classes, by label column.
        count: number of samples, readable or not.
        steps_per_epoch: number of steps in an epoch; 0 for a loader without a batch size.
        image_size: height and width of images; arrays have their own.
    """

    def __init__(
        self, dataset: Dataset, shard: Shard, image_size: int, device: torch.device, unreadable: Unreadable
    ) -> None:
        self.classes = dataset.classes
        self.count = len(dataset)
        self.steps_per_epoch = shard.steps_per_epoch
        self.image_size = image_size
        self._dataset = dataset
        self._spec = dataset.spec_at(image_size)
        self._shard = shard
        self._device = device
        self._unreadable = unreadable

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the samples that could not be read so far, each with the reason."""
        return self._unreadable.named

    @abstractmethod
    def batch(self, step: int) -> LoadedBatch:
        """Return this process's part of a step's batch."""

    @abstractmethod
    def sweep(self, batch: int) -> Iterator[LoadedBatch]:
        """Yield every readable sample of this process once, in order."""

    @abstractmethod
    def close(self) -> None:
        """Release workers and images."""


def make_loader(
    dataset: Dataset,
    *,
    image_size: int,
    device: torch.device | str,
    batch: int | None = None,
    seed: int = 0,
    repeats: int = 1,
    rank: int = 0,
    world_size: int = 1,
    keep: Keep = "auto",
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Progress | None = None,
) -> Loader:
    """Make a data loader. Batches are the same wherever images are kept.

    Args:
        dataset: what to load.
        image_size: height and width of images, before augmentation; arrays stay as they are.
        device: where batches are needed.
        batch: samples in a step, over all processes; None for a loader of sweeps alone.
        seed: seed of the order.
        repeats: how often a batch holds each of its samples.
        rank: rank of this process.
        world_size: number of processes.
        keep: ``device``: decode all images once and keep them there. ``workers``: decode them again each time, in
            worker processes. ``auto``: the first if it takes at most 40 % of the device's free memory (4 GiB on a CPU),
            otherwise the second.
        workers: number of worker processes or decoding threads; by default one for each core, at most 16. Arrays, which
            are in memory already, need none.
        max_unreadable: share of images that may be unreadable; more are an error.
        progress: called with the number of decoded images and the total.

    Raises:
        ImageError: too many images cannot be read.
        InvalidOption: the batch is not a multiple of the processes, or the dataset has fewer samples than that.
    """
    from vitrail.data.loading.memory import InMemoryLoader
    from vitrail.data.loading.workers import WorkerLoader

    device = torch.device(device)
    order = None if batch is None else Order(len(dataset), batch, seed, repeats)
    if image_size < 1:
        raise InvalidOption(f"image_size={image_size}: expected 1 or more pixels")
    if not 0 <= rank < world_size:
        raise InvalidOption(f"rank={rank}, world_size={world_size}: expected a rank from 0 to world_size - 1")
    if batch is not None and batch % world_size:
        raise InvalidOption(f"batch={batch} is not a multiple of the {world_size} processes")
    if workers is not None and workers < 0:
        raise InvalidOption(f"workers={workers}: expected 0 or more")
    if keep not in ("auto", "device", "workers"):
        raise InvalidOption(f"keep={keep!r}: expected 'auto', 'device' or 'workers'")
    if workers is None:
        workers = 0 if dataset.tensor_spec is not None else min(cpu_count(), MAX_WORKERS)
    unreadable = Unreadable(dataset, max_unreadable)
    shard = Shard(order, len(dataset), rank, world_size)
    fits = dataset.spec_at(image_size).nbytes * len(dataset) <= _room(device)
    if keep == "device" or (keep == "auto" and fits):
        return InMemoryLoader(dataset, shard, image_size, device, unreadable, workers, progress)
    return WorkerLoader(dataset, shard, image_size, device, unreadable, workers)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _room(device: torch.device) -> float:
    """Return how many bytes of a dataset a device may keep."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE
    return HOST_BYTES
