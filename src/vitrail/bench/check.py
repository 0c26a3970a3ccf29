"""Whether what is fast is also right: the merged model against the reference functions, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.bench.forms import values_of
from vitrail.bench.models import Base, copy_model

PICTURES = 16
"""Pictures that are compared; the rest of a batch goes the same way."""

NO_SWITCH = "Not compared: the merged model runs on the reference functions themselves"


@dataclass(frozen=True)
class Check:
    """How far the fast path is from the reference, and how far the dtype alone takes the reference.

    Each error is ‖a − b‖ / ‖b‖ of the model's outputs; each share counts the patches whose group has exactly the
    same members. Rounding alone flips merges of patches that are nearly equally alike, so in a short dtype a share
    below 1 is expected: the fast path is right where it is as near to the precise reference as the reference in the
    same dtype is.

    Attributes:
        error: fast path against the reference, both in the dtype of the run.
        equal_groups: likewise.
        error_precise: fast path against the reference in ``precise``.
        equal_groups_precise: likewise.
        error_of_dtype: reference in the dtype of the run against the reference in ``precise``.
        equal_groups_of_dtype: likewise.
        precise: the longer dtype.
        pictures: how many pictures were compared.
        gradient_error: fast path against the reference, for the gradients of all weights; None in inference.
        gradient_error_of_dtype: likewise, the reference against itself in ``precise``.
    """

    error: float
    equal_groups: float
    error_precise: float
    equal_groups_precise: float
    error_of_dtype: float
    equal_groups_of_dtype: float
    precise: str
    pictures: int
    gradient_error: float | None = None
    gradient_error_of_dtype: float | None = None


@dataclass(frozen=True)
class Seen:
    """What a merged model gave: its output, the group of each patch, and in training the gradients in one vector."""

    output: Tensor
    groups: Tensor
    gradient: Tensor | None = None


def kernels_used(place: torch.device) -> Any:
    """Say what merged models compute with on a device, as the kernels themselves tell it."""
    if place.type == "cpu" and torch.cuda.is_available():  # they would tell of the GPU
        return {"kernels": "reference", "why": "on the CPU"}
    describe = _from_kernels("describe")
    return "reference functions in PyTorch" if describe is None else describe()


def reference_switch() -> Callable[[], AbstractContextManager[Any]] | None:
    """Give what makes merged models use reference functions alone, where there are any others."""
    return _from_kernels("reference")


def compare(base: Base, batch: Tensor, *, autocast: torch.dtype | None = None, gradients: bool = False) -> Check | None:
    """Run the merged model on the fast path, on the reference and on the reference in a longer dtype.

    Gives None where there is only one path. With ``gradients`` the run is one that training would make, which may
    take other ways than inference does.
    """
    switch = reference_switch()
    if switch is None:
        return None
    pictures = batch[:PICTURES]
    dtype = autocast or pictures.dtype
    longer = torch.float64 if dtype == torch.float32 else torch.float32
    fast = _run(base, pictures, autocast, gradients)
    with switch():
        reference = _run(base, pictures, autocast, gradients)
        precise = _run(base, pictures.to(longer), None, gradients)
    return Check(
        error=relative_error(fast, reference),
        equal_groups=equal_groups(fast, reference),
        error_precise=relative_error(fast, precise),
        equal_groups_precise=equal_groups(fast, precise),
        error_of_dtype=relative_error(reference, precise),
        equal_groups_of_dtype=equal_groups(reference, precise),
        precise=str(longer).removeprefix("torch."),
        pictures=len(pictures),
        gradient_error=_gradient_error(fast, reference),
        gradient_error_of_dtype=_gradient_error(reference, precise),
    )


def relative_error(one: Seen, two: Seen) -> float:
    """Give ‖one − two‖ / ‖two‖ of the outputs."""
    return tensor_error(one.output, two.output)


def tensor_error(one: Tensor, two: Tensor) -> float:
    """Give ‖one − two‖ / ‖two‖; NaN and infinity stay what they are."""
    one, two = one.double(), two.double()
    return float((one - two).norm() / two.norm())


def equal_groups(one: Seen, two: Seen) -> float:
    """Give the share of patches whose group has the same members in both, whatever the groups are called."""
    same = [_same_members(a, b) for a, b in zip(one.groups, two.groups, strict=True)]
    return float(torch.cat(same).double().mean())


def _same_members(one: Tensor, two: Tensor) -> Tensor:
    together_one, together_two = one[:, None] == one, two[:, None] == two
    return (together_one == together_two).all(1)


def _gradient_error(one: Seen, two: Seen) -> float | None:
    return None if one.gradient is None or two.gradient is None else tensor_error(one.gradient, two.gradient)


def _run(base: Base, batch: Tensor, autocast: torch.dtype | None, gradients: bool) -> Seen:
    module = copy_model(base.module, share=True)
    if next(module.parameters()).dtype != batch.dtype:
        module = copy_model(base.module, share=False).to(batch.dtype)
    casting = torch.autocast(batch.device.type, autocast, enabled=autocast is not None)
    grad_mode = torch.enable_grad() if gradients else torch.inference_mode()
    with base.merge(module) as merging, merging.track() as trace, grad_mode:
        with casting:
            output = values_of(module(batch))
        return Seen(output.detach(), trace.groups, _gradient(module, output) if gradients else None)


def _gradient(module: nn.Module, output: Tensor) -> Tensor:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    found = torch.autograd.grad(output.float().square().mean(), weights, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def _from_kernels(name: str) -> Any:
    if find_spec("vitrail.kernels") is None:
        return None
    return getattr(import_module("vitrail.kernels"), name, None)
