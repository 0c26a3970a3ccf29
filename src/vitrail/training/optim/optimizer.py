"""The optimiser: which parameters decay, how the learning rate moves, and the running average of the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.models.vit import undecayed
from vitrail.training.optim.muon import Muon, hidden_weights

OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": Muon}


def parameter_groups(model: nn.Module, weight_decay: float, orthogonal: Collection[str] = ()) -> list[dict[str, Any]]:
    """Part the parameters that are trained into those that decay and those that do not, each with their names.

    Those to move by orthogonal matrices (see `Muon`), where there are any, are a third group.
    """
    spared = undecayed(model)
    groups = []
    for decay, moved, wanted in ((weight_decay, True, False), (weight_decay, False, False), (0.0, False, True)):
        chosen = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (name in spared) == wanted and (name in orthogonal) == moved
        }
        if chosen:
            group = {"params": list(chosen.values()), "names": list(chosen), "weight_decay": decay}
            groups.append(group | ({"orthogonal": True} if moved else {}))
    return groups


def make_optimizer(model: nn.Module, lr: float, weight_decay: float, kind: str = "adamw") -> torch.optim.AdamW:
    """Make AdamW, or Muon, with its state in place, so that there is nothing to save that appears later.

    On a GPU its learning rate is a tensor there, and a step of it can be recorded.
    """
    groups = parameter_groups(model, weight_decay, hidden_weights(model) if kind == "muon" else ())
    names = [group.pop("names") for group in groups]
    places = {parameter.device for group in groups for parameter in group["params"]}
    fused = all(place.type == "cuda" for place in places)
    rate = torch.tensor(lr, device=places.pop()) if fused and len(places) == 1 else lr
    optimizer = OPTIMIZERS[kind](groups, lr=rate, fused=fused, capturable=fused)
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["names"] = own
        for parameter in group["params"]:
            optimizer.state[parameter] = _first_state(parameter, fused, group.get("orthogonal", False))
    return optimizer


def _first_state(parameter: Tensor, fused: bool, orthogonal: bool) -> dict[str, Tensor]:
    if orthogonal:
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Give the optimiser's state by the names of its parameters: the tensors themselves, not copies."""
    return {
        f"{kind}.{name}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for kind, value in optimizer.state[parameter].items()
    }


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """Give the learning rate of a step: up in a straight line, then down along a cosine to a share of the peak.

    >>> [round(lr_at(step, peak=1.0, warmup=2, total=6, floor=0.0), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return peak * (floor + (1 - floor) * (1 + cos(pi * min(done, 1.0))) / 2)


class Ema:
    """A running average of a model's weights, which often does better than the last ones.

    Early steps count less: the decay rises with the steps to its value, so that the average forgets the random start.
    Buffers of statistics are averaged like weights; counters are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = dict(model.state_dict())
        self.tensors = {name: value.clone() for name, value in self._live.items()}
        floats = [name for name, value in self._live.items() if value.is_floating_point()]
        self._average = [_local(self.tensors[name]) for name in floats]
        self._current = [_local(self._live[name]) for name in floats]
        counters = [name for name in self._live if name not in set(floats)]
        self._counts = [self.tensors[name] for name in counters]
        self._counted = [self._live[name] for name in counters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._current, 1 - decay)
        if self._counts:
            torch._foreach_copy_(self._counts, self._counted)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights for the time of a ``with`` block."""
        kept = {name: value.clone() for name, value in self._live.items()}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in self._live.items():
            _local(value).copy_(_local(values[name]))


def _local(value: Tensor) -> Tensor:
    """Give this process's part of a tensor that several hold together."""
    return value.to_local() if isinstance(value, DTensor) else value
