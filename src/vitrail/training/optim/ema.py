"""Exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Ema:
    """Exponential moving average of a model's state.

    The decay starts low and rises to its value, so that the average forgets the initialization. Floating-point buffers
    are averaged like weights; integer buffers are copied. Unlike in ``torch.optim.swa_utils.AveragedModel``, the model
    is not copied, and can be sharded or hooked.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = dict(model.state_dict())
        self.tensors = {name: value.clone() for name, value in self._live.items()}
        floats = [name for name, value in self._live.items() if value.is_floating_point()]
        self._average = [_local(self.tensors[name]) for name in floats]
        self._current = [_local(self._live[name]) for name in floats]
        self._counters = [name for name in self._live if name not in floats]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._current, 1 - decay)
        for name in self._counters:
            self.tensors[name].copy_(self._live[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights in the model within a ``with`` block."""
        kept = {name: value.clone() for name, value in self._live.items()}
        self._copy(self.tensors)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, value in self._live.items():
            _local(value).copy_(_local(values[name]))


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
