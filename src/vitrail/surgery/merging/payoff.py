"""``Merging.pays``: whether merging saves time for a batch, measured on the model's own device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._checks import check_int, check_positive
from vitrail._timing import Clock, Spread, measure
from vitrail._wording import counted
from vitrail.adapters import Found, image_model
from vitrail.errors import UnsupportedInput
from vitrail.runtime.checks import refuse_packed
from vitrail.runtime.cuda_graphs.capture import capture
from vitrail.surgery.copies import copy_model, copy_unmerged


@dataclass(frozen=True)
class BestTime:
    """The fastest mode of a model: median seconds of a batch, and half the interquartile range over it."""

    mode: str
    seconds: float
    spread: float


@dataclass(frozen=True)
class Payoff:
    """Whether merging saves time: the merged and the unmerged model, each in its fastest mode.

    True where the merged model is faster by more than the times vary; ``str`` explains it in words and numbers.

    Attributes:
        batch: batch size.
        place: device and dtype, in words.
        unmerged, merged: the fastest mode of each.
        flops_ratio: multiply-adds without merging over those with it; None where they depend on the image.
    """

    batch: int
    place: str
    unmerged: BestTime
    merged: BestTime
    flops_ratio: float | None = None

    @property
    def speedup(self) -> float:
        """Time of the unmerged model over time of the merged one."""
        return self.unmerged.seconds / self.merged.seconds

    @property
    def margin(self) -> float:
        """The relative difference that noise alone can make."""
        return math.hypot(self.unmerged.spread, self.merged.spread)

    def __bool__(self) -> bool:
        return self.speedup > 1 + self.margin

    def __str__(self) -> str:
        found = "pays" if self else "does not pay" if self.speedup < 1 - self.margin else "makes no clear difference"
        ratio = "" if self.flops_ratio is None else f"; by multiply-adds it would be {self.flops_ratio:.2f} ×"
        lines = [
            f"Merging {found} at batch {self.batch} on {self.place}: {_in_words(self.merged)} instead of "
            f"{_in_words(self.unmerged)}, {self.speedup:.2f} × as fast{ratio}."
        ]
        if not self:
            lines.append("Use larger batches or inputs, a larger r, or no merging here.")
        return " ".join(lines)


def _in_words(time: BestTime) -> str:
    return f"{time.seconds * 1e3:.3g} ms ({time.mode})"


def measure_payoff(
    found: Found, batch: int | Tensor, seconds: float, flops: Callable[[tuple[int, ...]], float | None]
) -> Payoff:
    """Time copies of a merged trunk with and without merging, interleaved, on random inputs or on a batch.

    Args:
        found: the merged trunk.
        batch: number of random inputs, or a preprocessed batch.
        seconds: time for measuring, after warm-up.
        flops: returns the ratio of multiply-adds for inputs of a shape.
    """
    refuse_packed(found, "measuring whether merging pays")
    check_positive("seconds", seconds)
    weight = next(found.trunk.parameters())
    if isinstance(batch, Tensor):
        if batch.dim() < 3 or len(batch) == 0:
            raise UnsupportedInput(f"batch is a number of inputs, or a batch of them; got {tuple(batch.shape)}")
        images = batch.to(weight.device)
    else:
        check_int("batch", batch)
        shape = found.adapter.input_spec(found.trunk).shape
        images = torch.randn((batch, *shape), device=weight.device).to(weight.dtype)
    models = {"unmerged": copy_unmerged(found.trunk), "merged": copy_model(found.trunk, share=True)}
    steps = {
        (name, mode): call for name, model in models.items() for mode, call in _modes(image_model(model.eval()), images)
    }  # fmt: skip
    with torch.inference_mode():
        spreads = measure(steps, Clock(weight.device), seconds)
    ratio = flops(tuple(found.adapter.channels_first(found.trunk, images).shape[2:]))
    unmerged, merged = (_best(name, spreads) for name in models)
    return Payoff(len(images), describe_place(weight.device, weight.dtype), unmerged, merged, ratio)


def describe_place(device: torch.device, dtype: torch.dtype) -> str:
    """Return a device and a dtype in words."""
    name = f"the CPU with {counted(torch.get_num_threads(), 'thread')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        name = str(device)
    return f"{name} in {str(dtype).removeprefix('torch.')}"


def _modes(model: nn.Module, images: Tensor) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yield a model as it is called, and on a GPU as `vitrail.capture` runs it, where it can."""
    yield "eager", lambda _: model(images)
    if images.is_cuda:
        with suppress(Exception):  # whatever keeps a model from being recorded
            fast = capture(model, len(images), [tuple(images.shape[1:])])
            fast(images)
            yield "captured", lambda _: fast(images)


def _best(name: str, spreads: dict[tuple[str, str], Spread]) -> BestTime:
    mode, spread = min(
        ((mode, spread) for (own, mode), spread in spreads.items() if own == name), key=lambda one: one[1].median
    )
    return BestTime(mode, spread.median, spread.relative)
