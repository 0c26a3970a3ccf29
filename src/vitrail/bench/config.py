"""BenchConfig: what to measure, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.errors import InvalidOption

VARIANTS = ("unmerged", "sliced", "merged")
"""The model as its library runs it; tokens cut off for free; tokens merged."""

FORMS = ("eager", "graph", "compiled", "compiled-graph", "blocks", "blocks-graph")
"""Ways to run a model: as it is; as one recorded CUDA graph; through ``torch.compile``; that, recorded; with each
block compiled by itself; and that, recorded."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION = ("auto", "flash", "cudnn", "efficient", "math")
"""Kernels that PyTorch's attention may be held to; ``auto`` leaves the choice to PyTorch."""

COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class BenchConfig:
    """One measurement: a model, how much it merges, and how it is run.

    Attributes:
        model: ``timm:NAME`` or ``hf:REPO-OR-FOLDER``.
        r: tokens to merge in each layer, or one number per layer.
        batch: pictures in a batch.
        dtype: ``fp32``, ``bf16`` or ``fp16``, for weights and computation.
        device: ``cpu`` or ``cuda``; None takes CUDA where there is one.
        size: height and width of the pictures; None is the model's own size.
        train: measure a training step (forward, backward, AdamW) instead of inference.
        autocast: leave the weights in float32 and compute in ``dtype`` through ``torch.autocast``.
        forms: which of :data:`FORMS` to measure.
        variants: which of :data:`VARIANTS` to measure; speed-up and efficiency need all of them.
        schedule: how merges spread over depth, as for ``vitrail.merge``.
        proportional: count merged tokens by their size in attention, as for ``vitrail.merge``.
        attention: which of :data:`ATTENTION` PyTorch's own attention uses, in all variants.
        compile_mode: mode of ``torch.compile``.
        cold: compile from empty caches, as on a new machine.
        pretrained: load trained weights; speed does not depend on them.
        seconds: time to spend on measuring, shared by all rows, after warm-up and compilation.
        limit: seconds after which no further form is prepared and measuring begins; None for no limit.
        threads: CPU threads; None leaves them as they are.
        inputs: different random batches that take turns.
        check: compare the merged model's output with the reference functions'.
    """

    model: str
    r: int | tuple[int, ...] = 8
    batch: int = 64
    dtype: str = "fp32"
    device: str | None = None
    size: tuple[int, ...] | None = None
    train: bool = False
    autocast: bool = False
    forms: tuple[str, ...] = ("eager",)
    variants: tuple[str, ...] = VARIANTS
    schedule: str | float = "constant"
    proportional: bool = True
    attention: str = "auto"
    compile_mode: str = "default"
    cold: bool = False
    pretrained: bool = False
    seconds: float = 10.0
    limit: float | None = None
    threads: int | None = None
    inputs: int = 4
    check: bool = True

    def __post_init__(self) -> None:
        check_choices("variants", self.variants, VARIANTS)
        check_choices("forms", self.forms, FORMS)
        check_choices("dtype", (self.dtype,), tuple(DTYPES))
        check_choices("attention", (self.attention,), ATTENTION)
        check_choices("compile_mode", (self.compile_mode,), COMPILE_MODES)
        for name in ("batch", "inputs", "threads"):
            _check_count(name, getattr(self, name), optional=name == "threads")
        _check_r(self.r)
        check_time("seconds", self.seconds)
        if self.limit is not None:
            check_time("limit", self.limit)
        if self.device not in (None, "cpu", "cuda"):
            raise InvalidOption(f"device is cpu or cuda; got {self.device!r}")
        if self.size is not None and not (len(self.size) == 2 and all(_is_count(side) for side in self.size)):
            raise InvalidOption(f"size is height and width in pixels; got {self.size!r}")
        self._check_together()

    def _check_together(self) -> None:
        if self.train and any("graph" in form for form in self.forms):
            raise InvalidOption(
                "a training step (train) is not recorded as a CUDA graph here: gradients and the optimizer's state "
                "would have to live in it. Measure training with the forms eager, compiled or blocks"
            )
        if self.train and self.dtype == "fp16" and not self.autocast:
            raise InvalidOption(
                "training with weights in fp16 overflows within steps, and times of NaNs mean nothing; use bf16, or "
                "fp16 with autocast"
            )
        if self.autocast and self.dtype == "fp32":
            raise InvalidOption("autocast computes in a shorter dtype than float32; give dtype bf16 or fp16 with it")

    @property
    def place(self) -> torch.device:
        """The device to run on; raises where it is not there."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise InvalidOption("device cuda: no CUDA device can be used here. Run on the CPU (device cpu)")
        place = torch.device(self.device or ("cuda" if available else "cpu"))
        check_graphs(self.forms, place)
        return place

    def check_here(self) -> None:
        """Raise where this machine cannot do it; quick, so that mistakes are found before a model is loaded."""
        _ = self.place
        cores = os.cpu_count()
        if self.threads is not None and cores is not None and self.threads > cores:
            raise InvalidOption(
                f"threads {self.threads}: there are {cores} cores here, and threads that wait for one another say "
                f"nothing about a model. Give {cores} or fewer"
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """What products are computed in."""
        return DTYPES[self.dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        """What weights and pictures are kept in."""
        return torch.float32 if self.autocast else DTYPES[self.dtype]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What ``torch.autocast`` computes in; None without it."""
        return self.compute_dtype if self.autocast else None

    @property
    def compiles(self) -> bool:
        """Whether any form needs the compiler."""
        return compiles(self.forms)


def compiles(forms: Iterable[str]) -> bool:
    """Say whether any of some forms needs the compiler."""
    return any(form not in ("eager", "graph") for form in forms)


def check_graphs(forms: Iterable[str], place: torch.device) -> None:
    """Raise for forms that are recorded where nothing can be."""
    if place.type != "cuda" and any("graph" in form for form in forms):
        raise InvalidOption("CUDA graphs need a CUDA device; on the CPU use the forms eager, compiled or blocks")


def check_time(name: str, value: object) -> None:
    """Raise for what is not a time to spend."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidOption(f"{name} is a time above 0, in seconds; got {value!r}")


def check_choices(name: str, given: Any, known: Sequence[str]) -> None:
    """Raise for names that are not known, come twice, or are none at all."""
    wrong = [value for value in given if value not in known]
    if wrong or not given or len(set(given)) < len(given):
        got = ", ".join(map(repr, given)) or "nothing"
        raise InvalidOption(f"{name} is one of {', '.join(known)}; got {got}")


def _check_count(name: str, value: object, optional: bool) -> None:
    if not (value is None and optional) and not _is_count(value):
        raise InvalidOption(f"{name} is a whole number above 0; got {value!r}")


def _check_r(r: object) -> None:
    values = r if isinstance(r, tuple) else (r,)
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise InvalidOption(f"r counts tokens to merge per layer: whole numbers of 0 or more; got {r!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
