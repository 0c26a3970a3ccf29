"""Modes: ways to run a model, each turned into a step that can be timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.bench.config import BenchConfig, uses_graph
from vitrail.errors import UnsupportedInput

Call = Callable[[Tensor], Any]


@dataclass
class Runner:
    """A model in one mode.

    Attributes:
        step: run inference, or one training step, on the batch with that index; returns the output, or None.
        static_bytes: memory that stays allocated between steps: weights, buffers and optimizer state.
        graph: the CUDA graph that a step replays, if any.
    """

    step: Callable[[int], Any]
    static_bytes: Callable[[], int]
    graph: CapturedGraph | None = None


def prepare(config: BenchConfig, mode: str, model: nn.Module, batches: Sequence[Tensor]) -> Runner:
    """Prepare a model for a mode. Compilation and graph capture happen in the first step."""
    if config.train:
        call = _compiled(mode, model, config.compile_mode)
        return _prepare_training(call, model, batches, config.autocast_dtype)
    return prepare_inference(mode, model, batches, config.compile_mode, config.autocast_dtype)


def prepare_inference(
    mode: str, model: nn.Module, batches: Sequence[Tensor], compile_mode: str, autocast: torch.dtype | None = None
) -> Runner:
    """Prepare a model for inference in a mode, optionally under ``torch.autocast``."""
    compiled = _compiled(mode, model, compile_mode)

    def call(batch: Tensor) -> Any:
        with torch.autocast(batch.device.type, autocast, enabled=autocast is not None):
            return compiled(batch)

    target = compiled if autocast is None else call
    graph = CapturedGraph(target) if uses_graph(mode) else None

    @torch.inference_mode()
    def infer(index: int) -> Any:
        return (graph or target)(batches[index])

    return Runner(infer, lambda: _nbytes(model), graph)


@contextmanager
def fresh_compiler(cold: bool = False) -> Iterator[None]:
    """Reset the compiler before and after; with ``cold`` also use empty caches on disk."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with ExitStack() as stack:
        # each block may have its own shape, and none may silently fall back to eager
        limits = {"recompile_limit": 512, "accumulated_recompile_limit": 8192}
        stack.enter_context(torch._dynamo.config.patch(limits))
        if cold:
            stack.enter_context(fresh_cache())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TensorFloat32")
        yield
    torch._dynamo.reset()


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a model's output: the output itself, its logits, pooled features or tokens."""
    names = ("logits", "pooler_output", "last_hidden_state")
    for value in (output, *(getattr(output, name, None) for name in names)):
        if isinstance(value, Tensor):
            return value
    raise UnsupportedInput(
        f"the model returned a {type(output).__name__}; expected a tensor, or an output with {' or '.join(names)}"
    )


class CapturedGraph:
    """A call captured as a CUDA graph at first use, then replayed.

    Inputs are copied to the graph's static input; the copy is part of a step's time.

    Attributes:
        peak_bytes: peak memory during capture, beyond what was allocated before; replays allocate nothing.
    """

    def __init__(self, call: Call, warmup_steps: int = 3) -> None:
        self.call = call
        self.warmup_steps = warmup_steps
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None
        self.peak_bytes = 0

    def __call__(self, batch: Tensor) -> Any:
        if self.graph is None:
            self.graph = self._capture(batch)
        self.input.copy_(batch)
        self.graph.replay()
        return self.output

    def _capture(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        self.input = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and allocate workspaces before capture
            for _ in range(self.warmup_steps):
                self.call(self.input)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.output = self.call(self.input)
        self.peak_bytes = torch.cuda.max_memory_allocated() - before
        return graph


def _compiled(mode: str, model: nn.Module, compile_mode: str) -> Call:
    torch_mode = None if compile_mode == "default" else compile_mode
    if mode.startswith("compiled"):
        return torch.compile(model, dynamic=False, mode=torch_mode)
    if mode.startswith("blocks"):
        for block in find(model).blocks:
            block.compile(dynamic=False, mode=torch_mode)
    return model


def _prepare_training(call: Call, model: nn.Module, batches: Sequence[Tensor], autocast: torch.dtype | None) -> Runner:
    model.train()
    # a tiny learning rate: weights must stay finite however long the measurement takes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=batches[0].is_cuda or None)

    def train(index: int) -> None:
        batch = batches[index]
        with torch.autocast(batch.device.type, autocast, enabled=autocast is not None):
            output = output_tensor(call(batch))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def static_bytes() -> int:
        state = [value for values in optimizer.state.values() for value in values.values()]
        return _nbytes(model) + sum(value.nbytes for value in state if isinstance(value, Tensor))

    return Runner(train, static_bytes)


def _nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
