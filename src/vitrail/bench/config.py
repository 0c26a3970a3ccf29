"""BenchConfig: what to measure, validated before a model is built."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from vitrail._checks import as_tuple, check_positive, is_int
from vitrail._deprecation import renamed_arguments, renamed_property
from vitrail.errors import InvalidOption
from vitrail.surgery.saving import read_settings

VARIANTS = ("unmerged", "sliced", "merged")
"""The baseline as its library runs it; the lower bound, with tokens cut off for free; the merged model."""

CAPTURE = "capture"
MODES = ("eager", "graph", CAPTURE, "compiled", "compiled-graph", "blocks", "blocks-graph")
"""Ways to run a model: eager; captured as one CUDA graph; by ``vitrail.capture``; through ``torch.compile``; compiled
and captured; with each block compiled on its own; blocks compiled and captured."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION = ("auto", "flash", "cudnn", "efficient", "math")
"""PyTorch's attention: how members of ``SDPBackend`` begin; ``auto`` leaves the choice to PyTorch."""

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


@renamed_arguments(forms="modes")
@dataclass(frozen=True)
class BenchConfig:
    """One benchmark: a model, how much it merges, and how it runs.

    Attributes:
        model: a model's name, such as ``timm:NAME``.
        r: tokens to merge per layer, or one number for each layer.
        batch: images per batch.
        dtype: ``fp32``, ``bf16`` or ``fp16``, for weights and computation.
        device: ``cpu`` or ``cuda``; None uses CUDA if available.
        size: height and width of the input; None for the model's own size.
        train: measure a training step (forward, backward, AdamW) instead of inference.
        autocast: keep the weights in float32 and compute in ``dtype`` through ``torch.autocast``.
        modes: which of :data:`MODES` to measure.
        schedule: how merges spread over depth, as for ``vitrail.merge``.
        proportional: weight merged tokens by size in attention, as for ``vitrail.merge``.
        merge: settings that replace r, schedule and proportional: text such as ``keep=0.5,method=energy``, the JSON of
            ``vitrail tune``, or a directory of ``merging.save``.
        attention: which of :data:`ATTENTION` PyTorch's own attention uses, in all variants.
        compile_mode: mode of ``torch.compile``.
        cold: compile from empty caches, as on a new machine.
        pretrained: load pretrained weights; speed does not depend on them.
        seconds: time budget for measuring, shared by all rows, after warm-up and compilation.
        limit: seconds after which no further mode is prepared and measuring begins; None for no limit.
        threads: CPU threads; None leaves the setting unchanged.
        check: compare the merged model's output with the reference functions.
    """

    model: str
    r: int | tuple[int, ...] = 8
    batch: int = 64
    dtype: str = "fp32"
    device: str | None = None
    size: tuple[int, ...] | None = None
    train: bool = False
    autocast: bool = False
    modes: tuple[str, ...] = ("eager",)
    schedule: str | float = "constant"
    proportional: bool = True
    attention: str = "auto"
    compile_mode: str = "default"
    cold: bool = False
    pretrained: bool = False
    seconds: float = 10.0
    limit: float | None = None
    threads: int | None = None
    check: bool = True
    merge: str | None = None

    forms = renamed_property("forms", "modes")

    def __post_init__(self) -> None:
        check_choices("modes", self.modes, MODES)
        check_choices("dtype", (self.dtype,), tuple(DTYPES))
        check_choices("attention", (self.attention,), ATTENTION)
        check_choices("compile_mode", (self.compile_mode,), COMPILE_MODES)
        check_choices("device", (self.device,), (None, "cpu", "cuda"))
        _check_integers("batch", self.batch, 1)
        _check_integers("threads", 1 if self.threads is None else self.threads, 1)
        _check_integers("r", self.r, 0)
        if self.size is not None:
            _check_integers("size (height, width)", self.size, 1, length=2)
        if self.merge is not None:
            read_settings(self.merge)
        check_positive("seconds", self.seconds)
        check_positive("limit", 1.0 if self.limit is None else self.limit)
        if self.train and any(uses_graph(mode) for mode in self.modes):
            raise InvalidOption(
                "train=True does not work with CUDA graphs: gradients and optimizer state would have to be part of "
                "the graph. Use the modes eager, compiled or blocks"
            )
        if self.train and self.dtype == "fp16" and not self.autocast:
            raise InvalidOption("training overflows with fp16 weights; use bf16, or fp16 with autocast")
        if self.autocast and self.dtype == "fp32":
            raise InvalidOption("autocast needs a shorter dtype than fp32; choose dtype bf16 or fp16")

    @property
    def torch_device(self) -> torch.device:
        """The device to run on; raises where it is missing or cannot run the modes."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise InvalidOption("device is cuda, but no CUDA device is available; use device cpu")
        device = torch.device(self.device or ("cuda" if available else "cpu"))
        check_graphs(self.modes, device)
        return device

    def check_here(self) -> None:
        """Raise where this machine cannot run the benchmark; fast, so call it before loading a model."""
        _ = self.torch_device
        cores = os.cpu_count()
        if self.threads is not None and cores is not None and self.threads > cores:
            raise InvalidOption(f"threads is {self.threads}, but this machine has {cores} cores; use {cores} or fewer")

    @property
    def merging_text(self) -> str:
        """How the model merges, in a few words."""
        if self.merge is not None:
            return self.merge
        r = self.r if isinstance(self.r, int) else " ".join(map(str, self.r))
        return f"r = {r}" if self.proportional else f"r = {r}, sizes ignored"

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights and inputs."""
        return torch.float32 if self.autocast else DTYPES[self.dtype]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype for ``torch.autocast``; None without it."""
        return DTYPES[self.dtype] if self.autocast else None


def uses_compiler(modes: Iterable[str]) -> bool:
    """Return whether any mode needs ``torch.compile``."""
    return any(mode not in ("eager", "graph", CAPTURE) for mode in modes)


def uses_graph(mode: str) -> bool:
    """Return whether a mode captures CUDA graphs."""
    return mode == CAPTURE or mode.endswith("graph")


def check_graphs(modes: Iterable[str], device: torch.device) -> None:
    """Raise if a mode needs CUDA graphs and the device has none."""
    if device.type != "cuda" and any(uses_graph(mode) for mode in modes):
        raise InvalidOption("CUDA graphs need a CUDA device; on the CPU use the modes eager, compiled or blocks")


def check_choices(name: str, given: Collection[object], known: Sequence[str | None]) -> None:
    """Raise for unknown or repeated names, and for none at all."""
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        choices = ", ".join(choice for choice in known if choice is not None)
        got = ", ".join(map(repr, given)) or "nothing"
        raise InvalidOption(f"{name} must be one of {choices}; got {got}")


def _check_integers(name: str, given: object, least: int, *, length: int | None = None) -> None:
    """Raise unless a value is an integer, or a tuple of some, of at least ``least``."""
    values = as_tuple(given, int) or (given,)
    if not all(is_int(value, least) for value in values) or length not in (None, len(values)):
        kind = "an integer" if len(values) == 1 and length is None else "integers"
        raise InvalidOption(f"{name} must be {kind} of at least {least}; got {', '.join(map(repr, values))}")
