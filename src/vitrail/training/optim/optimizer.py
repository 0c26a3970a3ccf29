"""Optimizers: parameter groups, AdamW and Muon, their state, and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.vit import undecayed
from vitrail.training.optim.muon import Muon, hidden_weights

OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": Muon}


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    orthogonal: Collection[str] = (),
    rates: Mapping[nn.Parameter, float] | None = None,
) -> list[dict[str, Any]]:
    """Return groups of trainable parameters, with their names: with and without weight decay.

    Parameters named in ``orthogonal`` (see `Muon`) are a third group. Those in ``rates`` are in groups of their own,
    whose ``rate`` is a multiple of the learning rate.
    """
    spared, rates = undecayed(model), rates or {}
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = rate, hidden, flat = rates.get(parameter, 1.0), name in orthogonal, name in spared
            kind: dict[str, Any] = {"orthogonal": True} if hidden else {}
            kind |= {} if rate == 1 else {"rate": rate}
            empty = {"params": [], "names": [], "weight_decay": 0.0 if flat else weight_decay, **kind}
            group = groups.setdefault(key, empty)
            group["params"].append(parameter)
            group["names"].append(name)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0] != 1, key[0], not key[1], key[2]))]


def make_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    kind: str = "adamw",
    rates: Mapping[nn.Parameter, float] | None = None,
) -> torch.optim.AdamW:
    """Return an optimizer with its state allocated, so that checkpoints always have the same tensors.

    On a GPU learning rates are tensors, so that a CUDA graph can capture the step. ``rates`` are those of parameters
    that have one of their own, as multiples of ``lr``.
    """
    groups = parameter_groups(model, weight_decay, hidden_weights(model) if kind == "muon" else (), rates)
    names = [group.pop("names") for group in groups]
    devices = {parameter.device for group in groups for parameter in group["params"]}
    fused = all(device.type == "cuda" for device in devices)
    place = devices.pop() if fused and len(devices) == 1 else None
    for group in groups:
        rate = lr * group.get("rate", 1.0)
        group["lr"] = rate if place is None else torch.tensor(rate, device=place)
    optimizer = OPTIMIZERS[kind](groups, lr=lr, fused=fused, capturable=fused)
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["names"] = own
        for parameter in group["params"]:
            kinds = ("momentum",) if group.get("orthogonal") else ("exp_avg", "exp_avg_sq")
            state = {kind: torch.zeros_like(parameter, memory_format=torch.preserve_format) for kind in kinds}
            if not group.get("orthogonal"):
                step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
                state = {"step": step, **state}
            optimizer.state[parameter] = state
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate; groups with a ``rate`` of their own get that multiple of it."""
    for group in optimizer.param_groups:
        rate = lr * group.get("rate", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors (not copies) by name."""
    return {
        f"{kind}.{name}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for kind, value in optimizer.state[parameter].items()
    }


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay to a fraction ``floor`` of the peak.

    >>> [round(lr_at(step, peak=1.0, warmup=2, total=6, floor=0.0), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return peak * (floor + (1 - floor) * (1 + cos(pi * min(done, 1.0))) / 2)
