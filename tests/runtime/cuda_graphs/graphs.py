"""Graphs without a GPU: the operations of one call, recorded by torch.fx, replayed on the same memory.

Like a CUDA graph, a replay runs no Python, reads weights where they were, and writes into the tensors of the first
result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from vitrail.adapters.outputs import map_tensors


def leaves(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, output)
    return found


class Graph:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.operations = make_fx(lambda: leaves(function()))()
        self.result = map_tensors(Tensor.clone, function())
        self.replays = 0

    def __call__(self) -> Any:
        self.replays += 1
        for own, new in zip(leaves(self.result), self.operations(), strict=True):
            own.copy_(new)
        return self.result


class Pool:
    """`vitrail.runtime.cuda_graphs.graph.GraphPool` on a CPU."""

    made: list[Pool]

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[Graph] = []
        self.lock = threading.Lock()
        type(self).made.append(self)

    def record(self, function: Callable[[], Any]) -> tuple[Any, Graph]:
        self.graphs.append(Graph(function))
        return function(), self.graphs[-1]

    def turn(self) -> threading.Lock:
        return self.lock

    @classmethod
    def replays(cls) -> int:
        return sum(graph.replays for pool in cls.made for graph in pool.graphs)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    """Let captured models record on a CPU; the class lists the pools that were made."""
    Pool.made = []
    monkeypatch.setattr("vitrail.runtime.cuda_graphs.capture.GraphPool", Pool)
    monkeypatch.setattr("vitrail.runtime.cuda_graphs.capture._records", lambda device: True)
    return Pool
