"""What every data loader does: samples of any step, in a seeded order, and all samples once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vitrail._checks import check, check_choice, check_int, check_rank, check_share
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
        labels, indices: (b, T), with the dataset's columns, and (b,): positions in the dataset; both in int64.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


@dataclass(eq=False)
class Loader(ABC):
    """Loads the samples of any step, and all of them in order.

    A sample that cannot be read is replaced in steps by the next one that can be, and left out of a sweep. Attributes
    are the arguments of :func:`make_loader`; ``order`` is None and ``steps_per_epoch`` 0 for a loader of sweeps alone.
    """

    dataset: Dataset
    image_size: int
    device: torch.device
    order: Order | None
    rank: int
    world_size: int
    workers: int
    max_unreadable: float
    progress: Progress | None

    def __post_init__(self) -> None:
        self.classes = self.dataset.classes
        self.count = len(self.dataset)
        self.steps_per_epoch = 0 if self.order is None else self.order.steps_per_epoch
        self._spec = self.dataset.spec_at(self.image_size)
        self._unreadable: dict[int, str] = {}

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the samples that could not be read so far, each with the reason."""
        return [(self.dataset.name(index), reason) for index, reason in sorted(self._unreadable.items())]

    @abstractmethod
    def batch(self, step: int) -> LoadedBatch:
        """Return this rank's part of a step's batch."""

    @abstractmethod
    def sweep(self, batch: int) -> Iterator[LoadedBatch]:
        """Yield every readable sample of this rank once, in order."""

    @abstractmethod
    def close(self) -> None:
        """Release workers and images."""

    def _step_indices(self, step: int) -> Tensor:
        """Return the indices of this rank's part of a step."""
        if self.order is None:
            raise InvalidOption("this loader has no batch size, and so no steps; make it with one")
        return self.order.indices(step, self.rank, self.world_size)

    def _sweep_indices(self, batch: int) -> list[Tensor]:
        """Return all indices of this rank in order, split into batches."""
        check_int("batch", batch)
        return [part for part in torch.arange(self.count)[self.rank :: self.world_size].split(batch) if len(part)]

    def _add_unreadable(self, index: int, reason: str) -> None:
        """Count a sample that cannot be read; raise if there are more than the limit allows, or no sample is left."""
        self._unreadable[index] = reason
        number = len(self._unreadable)
        if number > self.max_unreadable * self.count or number == self.count:
            shown = "\n".join(f"  {reason.rstrip('.')}." for _, reason in self.skipped[:5])
            raise ImageError(
                f"{number} of {self.count} {self.dataset.noun} cannot be read, and max_unreadable allows a share of "
                f"{self.max_unreadable:g}:\n{shown}\nRepair or remove them, or allow more."
            )


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
        image_size: height and width of images, before augmentation; arrays stay as they are.
        device: where batches are needed.
        batch: samples in a step, over all ranks; None for a loader of sweeps alone.
        seed, repeats: as in :class:`~vitrail.data.loading.order.Order`.
        rank, world_size: which part of each batch this rank takes.
        keep: ``device``: decode all images once and keep them there. ``workers``: decode them again each time, in
            worker processes. ``auto``: the first if it takes at most 40 % of the device's free memory (4 GiB on a CPU),
            otherwise the second.
        workers: number of worker processes or decoding threads; by default one for each core, at most 16. Arrays, which
            are in memory already, need none.
        max_unreadable: share of images that may be unreadable; more are an error.
        progress: called with the number of decoded images and the total.
    """
    from vitrail.data.loading.memory import InMemoryLoader
    from vitrail.data.loading.workers import WorkerLoader

    device = torch.device(device)
    order = None if batch is None else Order(len(dataset), batch, seed, repeats)
    check_int("image_size", image_size)
    check_rank(rank, world_size)
    check("batch", batch, not (batch or 0) % world_size, f"a multiple of the world size, {world_size}")
    check_choice("keep", keep, get_args(Keep))
    check_share("max_unreadable", max_unreadable)
    if workers is None:
        workers = 0 if dataset.tensor_spec is not None else min(cpu_count(), MAX_WORKERS)
    check_int("workers", workers, 0)
    room = torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE if device.type == "cuda" else HOST_BYTES
    fits = dataset.spec_at(image_size).nbytes * len(dataset) <= room
    kind = InMemoryLoader if keep == "device" or (keep == "auto" and fits) else WorkerLoader
    return kind(dataset, image_size, device, order, rank, world_size, workers, max_unreadable, progress)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
