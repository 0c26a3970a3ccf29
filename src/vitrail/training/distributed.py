"""Training on several ranks: DDP, FSDP, and errors for lost connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vitrail._distributed import ConnectionLost, World
from vitrail.errors import TrainingError
from vitrail.models import ViT
from vitrail.surgery import Merging
from vitrail.surgery.added_tokens import added_module
from vitrail.training.config import Config


@contextmanager
def explain_failures(world: World, hint: Callable[[], str]) -> Iterator[None]:
    """Turn a lost connection or too little memory into an error that ends with ``hint()``."""
    try:
        yield
    except (RuntimeError, torch.OutOfMemoryError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError):
            raise TrainingError(
                "out of memory. Increase accumulate, which computes the batch in parts with the same result, or reduce "
                f"batch_size. {hint()}"
            ) from error
        lost = any(word in text.lower() for word in ("connection", "timed out", "timeout", "peer", "nccl", "gloo"))
        if world.world_size == 1 or not lost:
            raise
        raise ConnectionLost(
            f"rank {world.rank} of {world.world_size} lost the connection: another rank ended or hangs ({text[:200]}). "
            f"{hint()}"
        ) from error


def wrap(learner: nn.Module, config: Config, world: World) -> nn.Module:
    """Compile a learner as configured, and wrap it in DDP or FSDP if there are several ranks."""
    model: nn.Module = learner.model  # type: ignore[assignment]
    sharded = config.shard == "fsdp" and world.world_size > 1
    if config.compile == "blocks" or (config.compile == "whole" and sharded):
        for block in find_blocks(learner):
            block.compile()
    elif config.compile == "whole":
        learner.compile()
    if world.world_size == 1:
        return learner
    if sharded:
        return _shard(learner, model, world, half=config.dtype == "bf16")
    return nn.parallel.DistributedDataParallel(
        learner,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=not isinstance(model, ViT)
        or added_module(model) is not None  # a norm that nothing reads, heads without labels
        or _skips_layers(model, config),
    )


def _skips_layers(model: nn.Module, config: Config) -> bool:
    """Return whether a pass may leave parameters of a merging method unused, in layers that merge nothing."""
    if config.merge is None:
        return False
    merging = Merging.of(model)
    method, ramps = merging.method, config.merge.from_epoch or config.merge.over_epochs
    learns = next(method.parameters(), None) is not None and not method.decides
    return learns and (ramps or not method.static or 0 in merging.r)


def _shard(learner: nn.Module, model: nn.Module, world: World, half: bool) -> nn.Module:
    """Shard a learner, its model and the model's blocks with FSDP; the model can be called by itself for evaluation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for part in (*find_blocks(model), model, learner):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if isinstance(model, ViT):
        register_fsdp_forward_method(model, "forward_output")
    return learner


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: members of its outermost lists or sequences of modules."""
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
