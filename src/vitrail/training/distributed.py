"""A model that several processes train: how they share it, and notice that one of them is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vitrail._distributed import Crew, LinkLost
from vitrail.errors import TrainingError


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
