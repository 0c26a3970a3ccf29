"""Agreement check: the merged model on its fast path against the reference functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail import kernels
from vitrail._deprecation import renamed_property
from vitrail.adapters.outputs import output_tensor
from vitrail.bench._variants import Baseline
from vitrail.surgery.copies import copy_model

MAX_IMAGES = 16
"""Images to compare; the rest of a batch takes the same path."""


@dataclass(frozen=True)
class Check:
    """Distance of the fast path from the reference, and of the reference from itself in a longer dtype.

    Errors are ‖a − b‖ / ‖b‖ of the outputs. ``equal_groups`` is the share of patches whose group has exactly the same
    members. Rounding alone flips merges of nearly equally similar patches, so a share below 1 is expected in a short
    dtype: the fast path is right if it is as close to the precise reference as the reference in the same dtype is.

    Attributes:
        error, equal_groups: fast path against the reference, both in the benchmark's dtype.
        error_precise, equal_groups_precise: fast path against the reference in ``precise``.
        error_of_dtype, equal_groups_of_dtype: reference in the benchmark's dtype against the one in ``precise``.
        precise: the longer dtype.
        images: number of images compared.
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
    images: int
    gradient_error: float | None = None
    gradient_error_of_dtype: float | None = None

    pictures = renamed_property("pictures", "images")


@dataclass(frozen=True)
class Observed:
    """Result of one pass: the output, the group of each patch and, all gradients in one vector, empty in inference."""

    output: Tensor
    groups: Tensor
    gradient: Tensor


def kernels_used(device: torch.device) -> dict[str, Any]:
    """Return which kernels merged models use on a device, and why."""
    if device.type == "cpu" and torch.cuda.is_available():
        return {"kernels": "reference", "why": "on the CPU"}
    return kernels.describe()


def compare(base: Baseline, batch: Tensor, *, autocast: torch.dtype | None = None, gradients: bool = False) -> Check:
    """Run the merged model on the fast path, on the reference, and on the reference in a longer dtype.

    With ``gradients``, run a training pass, which may use other kernels than inference.
    """
    images = batch[:MAX_IMAGES]
    dtype = autocast or images.dtype
    longer = torch.float64 if dtype == torch.float32 else torch.float32
    fast = _observe(base, images, autocast, gradients)
    with kernels.reference():
        reference = _observe(base, images, autocast, gradients)
        precise = _observe(base, images.to(longer), None, gradients)
    return Check(
        error=relative_error(fast.output, reference.output),
        equal_groups=equal_groups(fast.groups, reference.groups),
        error_precise=relative_error(fast.output, precise.output),
        equal_groups_precise=equal_groups(fast.groups, precise.groups),
        error_of_dtype=relative_error(reference.output, precise.output),
        equal_groups_of_dtype=equal_groups(reference.groups, precise.groups),
        precise=str(longer).removeprefix("torch."),
        images=len(images),
        gradient_error=relative_error(fast.gradient, reference.gradient) if gradients else None,
        gradient_error_of_dtype=relative_error(reference.gradient, precise.gradient) if gradients else None,
    )


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖; NaN and infinity propagate."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def equal_groups(a: Tensor, b: Tensor) -> float:
    """Return the share of patches whose group has the same members in both maps (B, N); group ids may differ."""
    same = [((x[:, None] == x) == (y[:, None] == y)).all(1) for x, y in zip(a, b, strict=True)]
    return float(torch.cat(same).double().mean())


def _observe(base: Baseline, batch: Tensor, autocast: torch.dtype | None, gradients: bool) -> Observed:
    share = next(base.module.parameters()).dtype == batch.dtype
    module = copy_model(base.module, share=share).to(batch.dtype)
    grad_mode = torch.enable_grad() if gradients else torch.inference_mode()
    with base.merge(module) as merging, merging.track() as trace, grad_mode:
        with torch.autocast(batch.device.type, autocast, enabled=autocast is not None):
            output = output_tensor(module(batch))
        weights = [weight for weight in module.parameters() if weight.requires_grad and gradients]
        loss = output.float().square().mean()
        found = torch.autograd.grad(loss, weights, allow_unused=True) if weights else ()
        gradient = torch.cat([output.new_empty(0), *(each.flatten() for each in found if each is not None)])
        return Observed(output.detach(), trace.groups, gradient)
