"""Optimizers: parameter groups, AdamW and Muon, their state, and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Collection
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.vit import undecayed
from vitrail.training.optim.muon import Muon, hidden_weights

OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": Muon}


def parameter_groups(model: nn.Module, weight_decay: float, orthogonal: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return groups of trainable parameters, with their names: with and without weight decay.

    Parameters named in ``orthogonal`` (see `Muon`) are a third group.
    """
    spared = undecayed(model)
    groups: dict[tuple[bool, bool], dict[str, Any]] = {
        (True, False): {"params": [], "names": [], "weight_decay": weight_decay, "orthogonal": True},
        (False, False): {"params": [], "names": [], "weight_decay": weight_decay},
        (False, True): {"params": [], "names": [], "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[name in orthogonal, name in spared]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def make_optimizer(model: nn.Module, lr: float, weight_decay: float, kind: str = "adamw") -> torch.optim.AdamW:
    """Return an optimizer with its state allocated, so that checkpoints always have the same tensors.

    On a GPU the learning rate is a tensor, so that a CUDA graph can capture the step.
    """
    groups = parameter_groups(model, weight_decay, hidden_weights(model) if kind == "muon" else ())
    names = [group.pop("names") for group in groups]
    devices = {parameter.device for group in groups for parameter in group["params"]}
    fused = all(device.type == "cuda" for device in devices)
    rate = torch.tensor(lr, device=devices.pop()) if fused and len(devices) == 1 else lr
    optimizer = OPTIMIZERS[kind](groups, lr=rate, fused=fused, capturable=fused)
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
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


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
