"""Modes: ways to run a model, each turned into a step that can be timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.adapters.outputs import output_tensor
from vitrail.bench.config import CAPTURE, uses_graph
from vitrail.runtime.cuda_graphs.capture import CapturedModel, capture
from vitrail.runtime.cuda_graphs.graph import CudaGraph, warm_up

Call = Callable[[Tensor], Any]


@dataclass
class Runner:
    """A model in one mode.

    Attributes:
        step: run inference, or one training step, on the batch with that index; returns the output, or None.
        static_bytes: memory that stays allocated between steps: weights, buffers and optimizer state.
        graph: what a step replays, if anything.
        ready_s: seconds until the first step was done.
        peak: peak memory of a step in bytes; None on the CPU.
        difference: relative distance of the output from the eager one.
    """

    step: Callable[[int], Any]
    static_bytes: Callable[[], int]
    graph: CapturedGraph | Captured | None = None
    ready_s: float = 0.0
    peak: int | None = None
    difference: float | None = None


def prepare(
    mode: str,
    model: nn.Module,
    batches: Sequence[Tensor],
    compile_mode: str = "default",
    autocast: torch.dtype | None = None,
    train: bool = False,
) -> Runner:
    """Prepare inference or training steps in a mode. Compilation and graph capture happen in the first step."""
    compiled: Call = model
    captured = Captured(model) if mode == CAPTURE else None
    torch_mode = None if compile_mode == "default" else compile_mode
    if captured is not None:
        compiled = captured
    elif mode.startswith("compiled"):
        compiled = torch.compile(model, dynamic=False, mode=torch_mode)
    elif mode.startswith("blocks"):
        for block in find(model).blocks:
            block.compile(dynamic=False, mode=torch_mode)

    def call(batch: Tensor) -> Any:
        with torch.autocast(batch.device.type, autocast, enabled=autocast is not None):
            return compiled(batch)

    if train:
        return _prepare_training(call, model, batches)
    target = compiled if autocast is None else call
    graph = CapturedGraph(target) if captured is None and uses_graph(mode) else None

    @torch.inference_mode()
    def infer(index: int) -> Any:
        return (graph or target)(batches[index])

    return Runner(infer, lambda: _nbytes(model), captured or graph)


def _prepare_training(call: Call, model: nn.Module, batches: Sequence[Tensor]) -> Runner:
    model.train()
    # a tiny learning rate: weights must stay finite however long the measurement takes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=batches[0].is_cuda or None)

    def train(index: int) -> None:
        output_tensor(call(batches[index])).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def static_bytes() -> int:
        state = [value for values in optimizer.state.values() for value in values.values()]
        return _nbytes(model) + sum(value.nbytes for value in state if isinstance(value, Tensor))

    return Runner(train, static_bytes)


def _nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))


@contextmanager
def fresh_compiler(cold: bool = False) -> Iterator[None]:
    """Reset the compiler before and after; with ``cold`` also use empty caches on disk."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    # each block may have its own shape, and none may silently fall back to eager
    limits = torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=8192)
    with limits, fresh_cache() if cold else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32")
        yield
    torch._dynamo.reset()


class CapturedGraph:
    """A call captured as a CUDA graph at first use, then replayed.

    Attributes:
        peak_bytes: peak memory during the capture, beyond what was allocated before; replays allocate nothing.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.graph: CudaGraph[Any] | None = None
        self.peak_bytes = 0

    def __call__(self, batch: Tensor) -> Any:
        if self.graph is None:
            warm_up(self.call, (batch,))
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.graph = CudaGraph(self.call, (batch,))
            self.peak_bytes = torch.cuda.max_memory_allocated() - before
        return self.graph(batch)


class Captured:
    """A model captured by `vitrail.capture` for the batch of its first call.

    Attributes:
        peak_bytes: peak memory during the capture, beyond what was allocated before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.fast: CapturedModel | None = None
        self.peak_bytes = 0

    def __call__(self, batch: Tensor) -> Any:
        if self.fast is None:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.fast = capture(self.model, len(batch), [tuple(batch.shape[1:])])
            self.peak_bytes = torch.cuda.max_memory_allocated() - before
        return self.fast(batch)
