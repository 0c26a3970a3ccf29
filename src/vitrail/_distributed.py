"""Several processes as one: how they meet, agree, and part."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from vitrail.errors import InvalidOption, TrainingError, VitrailError

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one that is busy, decoding pictures or compiling, before they give up."""


def cores() -> int:
    """Give how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LinkLost(TrainingError):
    """Another process ended, or cannot be reached."""


class SaidElsewhere(TrainingError):
    """What the first process says, in another one: all end, and one of them tells why."""


@dataclass(frozen=True)
class Crew:
    """This process among those that work together."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Let every process do something; where it fails in one, it fails in all, with the same message."""
        if self.world == 1:
            return work()
        problem, done = None, None
        try:
            done = work()
        except VitrailError as error:
            problem = error
        said = self.gather(None if problem is None else str(problem))
        found = next((rank for rank, text in enumerate(said) if text is not None), None)
        if found is not None:
            self.fail(problem or TrainingError(f"Process {found} of {self.world}: {said[found]}"))
        return done  # type: ignore[return-value]

    def fail(self, error: VitrailError) -> NoReturn:
        """Raise an error that all processes came to together; only in the first one it is to be told."""
        raise error if self.first else SaidElsewhere(str(error)) from error

    def first_does(self, work: Callable[[], T]) -> T:
        """Let the first process do something, and give what it gives, or raises, to all."""
        value = self.together(lambda: work() if self.first else None)
        return self.share(value)  # type: ignore[return-value]

    def gather(self, value: Any) -> list[Any]:
        """Give every process the values of all, in the order of their ranks."""
        return [value] if self.world == 1 else gathered(value)

    def share(self, value: T) -> T:
        """Give every process the value of the first one."""
        if self.world == 1:
            return value
        box = [value if self.first else None]
        dist.broadcast_object_list(box, 0)
        return box[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            self.gather(None)


def told() -> tuple[int, int] | None:
    """Give this process's number and how many there are, as torchrun tells; None where it is alone."""
    said = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= said.keys() or said["WORLD_SIZE"] == "1":
        return None
    return int(said["RANK"]), int(said["WORLD_SIZE"])


def ranks() -> tuple[int, int]:
    """Give this process's number and how many there are in the process group, whoever made it; 0 and 1 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(value: Any) -> list[Any]:
    """Give every process of the group the values of all, in the order of their ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def place(device: str | None) -> torch.device:
    """Choose where to compute: on CUDA where there is one, unless it is said."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidOption("device='cuda': no CUDA device can be used here; leave it out, or say cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    rank, _ = told() or (0, 1)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


@contextmanager
def joined(device: str | None, patience: timedelta = PATIENCE, tensors: bool = True) -> Iterator[Crew]:
    """Join the processes that torchrun started, or be alone; leave them at the end.

    A process group that exists already is used as it is, and stays.

    Args:
        device: where to compute, as for `place`.
        patience: how long to wait for one that is busy.
        tensors: whether tensors on devices are exchanged, too; each process then needs a device of its own.
    """
    where = place(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if told() is None or (dist.is_available() and dist.is_initialized()):
        yield Crew(*ranks(), where)
        return
    linked = where if tensors and where.type == "cuda" else None
    dist.init_process_group("cpu:gloo,cuda:nccl" if linked else "gloo", timeout=patience, device_id=linked)
    try:
        yield Crew(*ranks(), where)
    finally:
        leave()


def leave() -> None:
    """Leave the other processes, with all that still holds on to the link."""
    gc.collect()
    dist.destroy_process_group()
