"""Distributed runs: ranks, world size, and collectives on Python objects."""

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

from vitrail._checks import as_device
from vitrail.errors import TrainingError, VitrailError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for one that is busy decoding images or compiling."""


def cpu_count() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ConnectionLost(TrainingError):
    """Another rank ended or cannot be reached."""


class ReportedByMain(TrainingError):
    """An error that rank 0 reports; the other ranks exit silently."""


@dataclass(frozen=True)
class World:
    """The rank of this process, the world size, and the device to compute on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def run(self, work: Callable[[], T]) -> T:
        """Run a function on every rank; if it fails on one, raise the same message on all."""
        if self.world_size == 1:
            return work()
        problem, result = None, None
        try:
            result = work()
        except VitrailError as error:
            problem = error
        messages = self.all_gather(None if problem is None else str(problem))
        failed = next((rank for rank, text in enumerate(messages) if text is not None), None)
        if failed is not None:
            self.fail(problem or TrainingError(f"Rank {failed} of {self.world_size}: {messages[failed]}"))
        return result  # type: ignore[return-value]

    def fail(self, error: VitrailError) -> NoReturn:
        """Raise an error that occurred on all ranks, to be reported by rank 0 alone."""
        raise error if self.is_main else ReportedByMain(str(error)) from error

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0, and return its result, or raise its error, on all ranks."""
        value = self.run(lambda: work() if self.is_main else None)
        return self.broadcast(value)  # type: ignore[return-value]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order."""
        return [value] if self.world_size == 1 else all_gather(value)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""
        if self.world_size == 1:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, 0)
        return box[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until all ranks arrive."""
        if self.world_size > 1:
            self.all_gather(None)


def torchrun_rank() -> tuple[int, int] | None:
    """Return rank and world size from torchrun's environment variables; None in a single process."""
    environment = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys() or environment["WORLD_SIZE"] == "1":
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size of the default process group; 0 and 1 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_first_to_report() -> bool:
    """Return whether no other rank has reported that the connection is lost: one message is enough.

    Ranks ask the store at which they met; where it is gone, too, each one reports.
    """
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=2))  # type: ignore[attr-defined]
        return int(store.add("vitrail/reported", 1)) == 1
    except (KeyError, ValueError, RuntimeError):
        return True


def choose_device(device: str | torch.device | int | None) -> torch.device:
    """Return the device to compute on: CUDA if available, unless ``device`` names one.

    Under torchrun, ``cuda`` is the device of this rank.
    """
    chosen = None if device is None else as_device("device", device)
    if chosen is not None and (chosen.type != "cuda" or chosen.index is not None):
        return chosen
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, _ = torchrun_rank() or (0, 1)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


@contextmanager
def distributed(
    device: str | torch.device | int | None, timeout: timedelta = TIMEOUT, tensors: bool = True
) -> Iterator[World]:
    """Set up the process group described by torchrun's environment, if any; destroy it on exit.

    An existing process group is used and left unchanged.

    Args:
        device: device to compute on; see `choose_device`.
        timeout: how long to wait for a busy rank.
        tensors: set up NCCL to exchange CUDA tensors; each rank then needs its own device.
    """
    where = choose_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if torchrun_rank() is None or (dist.is_available() and dist.is_initialized()):
        yield World(*rank_and_world_size(), where)
        return
    nccl_device = where if tensors and where.type == "cuda" else None
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl_device else "gloo", timeout=timeout, device_id=nccl_device)
    try:
        yield World(*rank_and_world_size(), where)
    finally:
        gc.collect()  # objects that still hold the connection would crash its threads
        dist.destroy_process_group()
