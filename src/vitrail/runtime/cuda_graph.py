"""CUDA graphs: a function captured once, then replayed on other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CudaGraph(Generic[Result]):
    """A function of tensors as a CUDA graph. Every call returns the same tensors, with new values.

    Inputs are copied to the graph's own. A capture computes nothing, and compilers and libraries cannot initialize
    during it: run the function a few times before, on a side stream.
    """

    def __init__(self, function: Callable[..., Result], inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(torch.empty_like(one) for one in inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Threads of the data loader pin memory meanwhile, which other modes forbid.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Result:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result
