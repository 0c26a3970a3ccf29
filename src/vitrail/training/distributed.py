"""Several processes as one: how they start, agree, share a model, and notice that one of them is gone."""

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
from torch import nn

from vitrail.errors import InvalidOption, TrainingError, VitrailError

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one that is busy, decoding pictures or compiling, before they give up."""


class LinkLost(TrainingError):
    """Another process ended, or cannot be reached."""


class SaidElsewhere(TrainingError):
    """What the first process says, in another one: all end, and one of them tells why."""


@dataclass(frozen=True)
class Crew:
    """This process among those that train together."""

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
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

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


def place(device: str | None) -> torch.device:
    """Choose where to compute: on CUDA where there is one, unless it is said."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidOption("device='cuda': no CUDA device can be used here; leave it out, or say cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def joined(device: str | None) -> Iterator[Crew]:
    """Join the processes that torchrun started, or be alone; leave them at the end.

    A process group that exists already is used as it is, and stays.
    """
    where = place(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if dist.is_initialized():
        yield Crew(dist.get_rank(), dist.get_world_size(), where)
        return
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if None in told or told[1] == "1":
        yield Crew(0, 1, where)
        return
    cuda = where.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE, device_id=where if cuda else None
    )
    try:
        yield Crew(dist.get_rank(), dist.get_world_size(), where)
    finally:
        leave()


def leave() -> None:
    """Leave the other processes, with all that still holds on to the link."""
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def broken_links(crew: Crew, last: Callable[[], str]) -> Iterator[None]:
    """Turn a lost connection to another process into a message; ``last`` says what can be gone on from."""
    try:
        yield
    except (RuntimeError, torch.OutOfMemoryError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError):
            raise TrainingError(
                "The device has not enough memory for this batch. Give a larger accumulate, which computes it in "
                f"parts with the same result, or a smaller batch_size. {last()}"
            ) from error
        lost = any(word in text.lower() for word in ("connection", "timed out", "timeout", "peer", "nccl", "gloo"))
        if crew.world == 1 or not lost:
            raise
        raise LinkLost(
            f"Process {crew.rank} of {crew.world} lost the others: one of them ended or hangs ({text[:200]}). {last()}"
        ) from error


def wrap_ddp(learner: nn.Module, crew: Crew, unused: bool) -> nn.Module:
    """Let every process have a copy and average the gradients; ``unused``: some parameters may take no part."""
    from torch.nn.parallel import DistributedDataParallel

    devices = [crew.device] if crew.device.type == "cuda" else None
    return DistributedDataParallel(
        learner, device_ids=devices, gradient_as_bucket_view=True, find_unused_parameters=unused
    )


def wrap_fsdp(learner: nn.Module, model: nn.Module, crew: Crew, dtype: str) -> nn.Module:
    """Let every process have a part of each parameter; a block is put together for the time that it runs.

    The model inside the learner is put together, too, when it is asked by itself: for evaluation.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(crew.device.type, (crew.world,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else None
    options: dict[str, Any] = {"mesh": mesh, **({} if half is None else {"mp_policy": half})}
    for part in (*repeated(model), model, learner):
        fully_shard(part, **options)
    if hasattr(model, "forward_output"):
        register_fsdp_forward_method(model, "forward_output")
    return learner


def repeated(model: nn.Module) -> list[nn.Module]:
    """Give the blocks that a model is a sequence of: the members of its lists of modules, outermost ones alone."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in model.modules():
        if part in inside:
            continue
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1:
            blocks = [child for child in part if sum(1 for _ in child.modules()) > 3]
            if len(blocks) > 1:
                found += blocks
                inside |= {inner for block in blocks for inner in block.modules()}
    return found
