"""What brings examples to the device, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.data.dataset import Examples
from vitrail.data.loading.order import Order
from vitrail.errors import ImageError, InvalidOption

Keep = Literal["auto", "device", "workers"]
Progress = Callable[[int, int], object]

DEVICE_SHARE = 0.4
"""How much of a device's free memory pictures may take where nobody says where to keep them."""

HOST_BYTES = 4 << 30
"""The same of the host's memory, in bytes."""


class Batch(NamedTuple):
    """Examples on the device.

    Attributes:
        images: (b, 3, S, S) in uint8; of arrays (b, C, ...), as they are.
        labels: (b, T) in int64, columns in the order of the feed's classes.
        indices: (b,) in int64: which examples they are.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


class Feed(Protocol):
    """Brings the examples of any step, and all of them in order.

    An example that cannot be read is replaced in training by the next one that can be, and left out of a sweep.

    Attributes:
        classes: names of the classes, by label column.
        count: how many examples there are, readable or not.
        steps_per_epoch: how many steps an epoch has; 0 of a feed that is for sweeps alone.
        side: height and width of the pictures; arrays have their own.
        skipped: names of the pictures that could not be read so far, and why.
    """

    classes: dict[str, tuple[str, ...]]
    count: int
    steps_per_epoch: int
    side: int

    @property
    def skipped(self) -> list[tuple[str, str]]: ...

    def batch(self, step: int) -> Batch:
        """Give this process's part of a step's batch."""
        ...

    def sweep(self, batch: int) -> Iterator[Batch]:
        """Give every example once, in order: those of this process, so many at a time."""
        ...

    def close(self) -> None:
        """Let go of workers and pictures."""
        ...


@dataclass(frozen=True)
class Share:
    """What one process among several sees of the examples."""

    order: Order | None
    count: int
    rank: int = 0
    world: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has."""
        return 0 if self.order is None else self.order.steps_per_epoch

    def step(self, number: int) -> Tensor:
        """Give the examples of a step: this process's slice of the batch."""
        if self.order is None:
            raise InvalidOption("This feed was made for sweeps alone. Make one with a batch to have steps.")
        size = self.order.batch // self.world
        return self.order.indices(number)[self.rank * size : (self.rank + 1) * size]

    def every(self, batch: int) -> list[Tensor]:
        """Give all examples of this process in order, so many at a time."""
        if batch < 1:
            raise InvalidOption(f"batch={batch}: expected 1 or more examples at a time.")
        return [part for part in torch.arange(self.count)[self.rank :: self.world].split(batch) if len(part)]


class Unreadable:
    """Pictures that could not be read: counted, named, and too many of them an error."""

    def __init__(self, examples: Examples, limit: float) -> None:
        if not 0 <= limit <= 1:
            raise InvalidOption(f"max_unreadable={limit}: expected a share from 0 to 1.")
        self._examples = examples
        self._limit = limit
        self._found: dict[int, str] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __len__(self) -> int:
        return len(self._found)

    @property
    def named(self) -> list[tuple[str, str]]:
        """Names and reasons, in order."""
        return [(self._examples.name(index), reason) for index, reason in sorted(self._found.items())]

    def add(self, index: int, reason: str) -> None:
        """Count a picture.

        Raises:
            ImageError: they are more than the limit allows, or all that there are.
        """
        self._found[index] = reason
        count = len(self._examples)
        if len(self._found) > self._limit * count or len(self._found) == count:
            shown = "\n".join(f"  {reason}" for _, reason in self.named[:5])
            raise ImageError(
                f"{len(self._found)} of {count} pictures cannot be read, and max_unreadable allows a share of "
                f"{self._limit:g}:\n{shown}\nRepair or remove them, or allow more."
            )


class KnownFeed:
    """What every feed knows before it has read anything."""

    def __init__(
        self, examples: Examples, share: Share, side: int, device: torch.device, unreadable: Unreadable
    ) -> None:
        self.classes = examples.classes
        self.count = len(examples)
        self.steps_per_epoch = share.steps_per_epoch
        self.side = side
        self._form = examples.form(side)
        self._share = share
        self._device = device
        self._unreadable = unreadable

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the pictures that could not be read so far, and why."""
        return self._unreadable.named


def make_feed(
    examples: Examples,
    *,
    side: int,
    device: torch.device | str,
    batch: int | None = None,
    seed: int = 0,
    repeats: int = 1,
    rank: int = 0,
    world: int = 1,
    keep: Keep = "auto",
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Progress | None = None,
) -> Feed:
    """Make what brings examples to the device. The batches are the same ones wherever pictures are kept.

    Args:
        examples: what to learn from.
        side: height and width of the pictures, before augmentation; arrays stay as they are.
        device: where batches are wanted.
        batch: examples in a step, over all processes; None for a feed that is for sweeps alone.
        seed: decides their order.
        repeats: how often a batch holds each of its examples.
        rank: number of this process.
        world: how many there are.
        keep: ``device``: decode all pictures once and keep them there. ``workers``: read them again each time, in
            processes beside this one. ``auto``: the first where it takes at most 40 % of the device's free memory (4
            GiB on a CPU), and else the second.
        workers: how many processes or threads read; by default one for each core, and at most 16. Arrays, which are
            in memory already, need none.
        max_unreadable: the share of pictures that may be unreadable; more are an error.
        progress: told how many pictures were decoded, and how many there are.

    Raises:
        ImageError: too many pictures cannot be read.
        InvalidOption: the batch cannot be shared out among the processes, or there are fewer examples than that.
    """
    from vitrail.data.loading.memory import ResidentFeed
    from vitrail.data.loading.workers import WorkerFeed

    device = torch.device(device)
    order = None if batch is None else Order(len(examples), batch, seed, repeats)
    if side < 1:
        raise InvalidOption(f"side={side}: expected 1 or more pixels.")
    if not 0 <= rank < world:
        raise InvalidOption(f"rank={rank}, world={world}: expected a rank from 0 to one less than world.")
    if batch is not None and batch % world:
        raise InvalidOption(f"batch={batch} cannot be shared out evenly among {world} processes. Expected a multiple.")
    if workers is not None and workers < 0:
        raise InvalidOption(f"workers={workers}: expected 0 or more.")
    if keep not in ("auto", "device", "workers"):
        raise InvalidOption(f"keep={keep!r}: expected 'auto', 'device' or 'workers'.")
    fits = examples.form(side).nbytes * len(examples) <= room(device)
    if workers is None and examples.own is not None:
        workers = 0
    unreadable = Unreadable(examples, max_unreadable)
    share = Share(order, len(examples), rank, world)
    if keep == "device" or (keep == "auto" and fits):
        return ResidentFeed(examples, share, side, device, unreadable, workers, progress)
    return WorkerFeed(examples, share, side, device, unreadable, workers)


def room(device: torch.device) -> float:
    """Say how many bytes of pictures a device may keep."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE
    return HOST_BYTES
