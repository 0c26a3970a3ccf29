"""CUDA graphs: a function captured once, then replayed on other inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

WARMUP_STEPS = 3
"""Calls before a capture, on a side stream, while compilers and libraries initialize."""


def is_capturing() -> bool:
    """Return whether this thread captures a CUDA graph now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def warm_up(function: Callable[..., Result], inputs: tuple[Tensor, ...] = ()) -> Result:
    """Call a function on a side stream as often as a capture requires; return its last result."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = [function(*inputs) for _ in range(WARMUP_STEPS)][-1]
    current.wait_stream(side)
    torch.cuda.synchronize()
    return result


class CudaGraph(Generic[Result]):
    """A function of tensors as a CUDA graph. Every call returns the same tensors, with new values.

    Inputs are copied to the graph's own. A capture computes nothing, and nothing can initialize during it: call the
    function :data:`WARMUP_STEPS` times before, as `warm_up` does. Graphs may share a memory ``pool`` if no two run at
    the same time, and the result of one is copied before another runs.
    """

    def __init__(self, function: Callable[..., Result], inputs: tuple[Tensor, ...], pool: Any = None) -> None:
        self._inputs = tuple(torch.empty_like(one) for one in inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Threads of the data loader pin memory meanwhile, which other modes forbid.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Result:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result


class GraphPool:
    """CUDA graphs of functions without inputs that share memory: they run one after the other, on any stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.RLock()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # graphs that this pool replaces may still run
            self._pool, self._done = torch.cuda.graph_pool_handle(), torch.cuda.Event()

    def record(self, function: Callable[[], Result]) -> tuple[Result, CudaGraph[Result]]:
        """Return a function's result, and its graph. Begin with the largest graph: others fit into its memory."""
        with torch.cuda.device(self._device):
            return warm_up(function), CudaGraph(function, (), self._pool)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread and stream write inputs, run graphs and read results inside the ``with`` block."""
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)
