"""Calibration: set the thresholds of a dynamic method on images, so that their mean meets a budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail._checks import is_number
from vitrail._wording import counted
from vitrail.adapters import Found, image_model
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.merging import Schedule
from vitrail.merging.methods.dynamic import Calibrated
from vitrail.runtime.plan import Plan
from vitrail.runtime.trace import tracking
from vitrail.surgery.recording import check_finite, evaluating, input_axes, read_batches, taking, to_model

MOST_PASSES = 16
"""Most passes over the images after the one that measures."""


@dataclass(frozen=True)
class Calibration:
    """The result of ``Merging.calibrate``, counted on the calibration images.

    Attributes:
        images: number of images.
        keep: mean share of the patches left after the last layer.
        gflops: mean cost of one input, in 10⁹ multiply-adds.
        deviation: relative deviation of the mean from the requested budget; above 0 where more is left.
        fewest: least number of patches left in an image.
        most: largest number of patches left in an image.
        settings: options of the method that were set.
    """

    images: int
    keep: float
    gflops: float
    deviation: float
    fewest: int
    most: int
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)


def calibrate(
    model: nn.Module,
    found: Found,
    plan: Plan,
    target: Schedule | None,
    images: Any,
    batch_size: int | None,
    limit: int,
    tolerance: float,
) -> Calibration:
    """Set the method's settings for a budget; leave everything as it was if that fails. See ``Merging.calibrate``."""
    method, schedule = plan.method, plan.schedule
    if not isinstance(method, Calibrated):
        raise InvalidOption(
            f"method {method.label} has nothing to calibrate; merge with method='threshold' or another subclass of "
            "vitrail.merging.methods.dynamic.Calibrated"
        )
    if target is None or (target.r, target.keep, target.gflops) == (None, None, None):
        raise InvalidOption("calibrate needs a budget: pass keep= or gflops=, for example keep=0.5")
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise InvalidOption(f"tolerance is a relative deviation between 0 and 1; got {tolerance!r}")
    unmerged = plan.counter(plan.layout.num_special, plan.layout.num_patches, plan.layout.grid)([0] * plan.depth)
    if target.gflops is not None and target.gflops * 1e9 >= unmerged:
        raise InvalidOption(
            f"gflops={target.gflops:g} is no budget: this model costs {unmerged / 1e9:.4g} GFLOPs without merging; "
            "pass less than that"
        )
    data = images
    if not isinstance(images, Batches):
        data = open_batches(images, limit=limit, with_labels=False, axes=input_axes(found)).repeatable()

    settings = method.settings
    try:
        with evaluating(model), torch.no_grad():
            plan.change(target)
            with method.measuring(plan.depth):
                planned = _count(model, found, plan, data, batch_size)
            if not method.budgeted:
                plan.change(Schedule())
            count = partial(_count, model, found, plan, data, batch_size)
            return _refine(method, count, partial(_deviation, target, planned), tolerance)
    except BaseException:
        plan.change(schedule)
        method.settings = settings
        raise


@dataclass(frozen=True)
class _Counts:
    """Patches before, planned to be left, and left, and the cost of each image, as lists over images."""

    patches: list[int]
    planned: list[int]
    kept: list[int]
    flops: list[int]


def _count(model: nn.Module, found: Found, plan: Plan, data: Batches, batch_size: int | None) -> _Counts:
    """Run the model on all images and count what is left."""
    counts = _Counts([], [], [], [])
    for batch in read_batches(found, data, batch_size):
        with tracking(plan) as trace, taking(found, batch), found.blocks[-1].register_forward_hook(_check_tokens):
            image_model(found.trunk)(to_model(model, batch))
        kept = (trace.tokens_per_layer[:, -1] - trace.layout.num_special).tolist()
        patches = trace.layout.num_patches
        counts.patches.extend([patches] * len(kept))
        counts.planned.extend([max(1, patches - sum(trace.latest.state.per_layer))] * len(kept))
        counts.kept.extend(kept)
        counts.flops.extend(trace.flops.tolist())
    if not counts.kept:
        raise UnsupportedInput("there are no images to calibrate on")
    return counts


def _check_tokens(_: nn.Module, __: Any, output: Any) -> None:
    check_finite(output[0] if isinstance(output, tuple) else output, "tokens after the last block")


def _deviation(target: Schedule, planned: _Counts, counts: _Counts) -> float:
    """Return the relative deviation of the mean from the target."""
    if target.gflops is None:
        return sum(counts.kept) / sum(planned.planned) - 1
    return sum(counts.flops) / len(counts.flops) / (target.gflops * 1e9) - 1


def _refine(
    method: Calibrated, count: Callable[[], _Counts], measure: Callable[[_Counts], float], tolerance: float
) -> Calibration:
    """Shift all settings by bisection until the mean meets the budget, and return the result."""
    base = method.settings
    best: tuple[float, _Counts, dict[str, Any]] | None = None
    low: float | None = None  # shifts that leave too much, and too little
    high: float | None = None
    shift, step = 0.0, method.step
    for _ in range(MOST_PASSES):
        method.settings = base
        method.shift(shift)
        counts = count()
        deviation = measure(counts)
        if best is None or abs(deviation) < abs(best[0]):
            best = deviation, counts, method.settings
        if abs(deviation) <= tolerance:
            break
        low, high = (shift, high) if deviation > 0 else (low, shift)
        if low is None or high is None:
            shift, step = shift + (step if deviation > 0 else -step), 2 * step
        else:
            shift = (low + high) / 2
    assert best is not None
    deviation, counts, method.settings = best
    if abs(deviation) > tolerance:
        warnings.warn(
            f"calibration missed the budget by {deviation:+.1%} on {counted(len(counts.kept), 'image')}; use "
            f"{'more images, a larger budget' if deviation > 0 else 'more images'} or a larger tolerance",
            VitrailWarning,
            stacklevel=4,
        )
    total = len(counts.kept)
    return Calibration(
        total, sum(counts.kept) / sum(counts.patches), sum(counts.flops) / total / 1e9, deviation,
        min(counts.kept), max(counts.kept), method.settings,
    )  # fmt: skip
