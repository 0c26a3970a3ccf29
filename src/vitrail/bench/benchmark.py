"""``run`` and ``time_models``: prepare models in modes, then time all of them interleaved."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import as_tuple, check_positive
from vitrail._deprecation import renamed_arguments, renamed_property
from vitrail._timing import Clock, Key, Spread, Step, measure
from vitrail._wording import kind_of
from vitrail.adapters.outputs import output_tensor
from vitrail.bench._agreement import compare, kernels_used, relative_error
from vitrail.bench._modes import Runner, fresh_compiler, prepare
from vitrail.bench._variants import INPUTS, Baseline, build, does_not_fit, random_batches, try_input_size
from vitrail.bench.config import (
    COMPILE_MODES,
    MODES,
    VARIANTS,
    BenchConfig,
    check_choices,
    check_graphs,
    uses_compiler,
)
from vitrail.bench.machine import describe_machine
from vitrail.bench.result import BenchResult, Failure, Row
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.surgery.copies import copy_model

Tell = Callable[[str], object]
"""Called with a short text when a stage begins."""

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
"""In the message when the CPU runs out of memory: torch has no error class for it."""


@checked
def run(config: BenchConfig, *, model: nn.Module | None = None, tell: Tell | None = None) -> BenchResult:
    """Measure a model unmerged, sliced and merged.

    >>> result = run(BenchConfig("timm:vit_base_patch16_224", r=16, batch=256, dtype="bf16"))   # doctest: +SKIP
    >>> result.speedup, result.efficiency                                                       # doctest: +SKIP

    Args:
        config: what to measure.
        model: a model to use instead of loading the configured one; it is moved to the device and dtype, and
            otherwise unchanged.
        tell: called with a short text when a stage begins.
    """
    tell = tell or (lambda text: None)
    config.check_here()
    device, notes = config.torch_device, []
    if device.type == "cpu" and config.dtype == "fp16":
        notes = ["fp16 on a CPU is emulated and slow, so its times mean little. Use fp32 or bf16"]
        warnings.warn(notes[0], VitrailWarning, stacklevel=2)
    clock = Clock(device)
    with _settings(config):
        began = clock.now()
        tell(f"building {config.model}")
        base = build(config, model)
        batches = random_batches(config, base.shape)
        try_input_size(base, config, batches[0])  # also loads the device's libraries, so no row pays for that
        startup = _start_compiler(config, clock, tell)
        check = None
        if config.check:
            tell("comparing with the reference")
            check = compare(base, batches[0], autocast=config.autocast_dtype, gradients=config.train)
        deadline = math.inf if config.limit is None else began + config.limit
        runners, failed = _prepare_all(config, base, batches, clock, deadline, tell)
        tell(f"measuring {len(runners)} rows for {config.seconds:g} s")
        steps = {key: runner.step for key, runner in runners.items()}
        spreads = measure(steps, clock, config.seconds, inputs=INPUTS)
        machine, kernels = describe_machine(device), kernels_used(device)
    rows = []
    for variant, mode in sorted(runners, key=lambda key: (VARIANTS.index(key[0]), config.modes.index(key[1]))):
        flops = base.flops_before if variant == "unmerged" else base.flops_after
        rows.append(make_row(config, variant, mode, runners[variant, mode], spreads[variant, mode], flops))
    return BenchResult(
        config=config,
        rows=tuple(rows),
        failed=tuple(failed),
        size=base.shape[1:],
        tokens_before=base.tokens_before,
        tokens_per_layer=base.tokens,
        flops_before=base.flops_before,
        flops_after=base.flops_after,
        check=check,
        kernels=kernels,
        startup_s=startup,
        machine=machine,
        notes=tuple(notes),
    )


def make_row(config: BenchConfig, variant: str, mode: str, runner: Runner, spread: Spread, flops: int) -> Row:
    """Return the row of a variant in a mode, whose steps took these times."""
    passes = 3 if config.train else 1
    return Row(
        variant=variant,
        mode=mode,
        ms=spread.median * 1e3,
        images_per_s=config.batch / spread.median,
        peak_mb=None if runner.peak is None else runner.peak / 1e6,
        ready_s=runner.ready_s,
        ms_low=spread.low * 1e3,
        ms_high=spread.high * 1e3,
        ms_least=spread.least * 1e3,
        samples=spread.samples,
        loops=spread.loops,
        tflops=2 * flops * config.batch * passes / spread.median / 1e12,
        difference=runner.difference,
    )


def _prepare_all(
    config: BenchConfig, base: Baseline, batches: list[Tensor], clock: Clock, deadline: float, tell: Tell
) -> tuple[dict[tuple[str, str], Runner], list[Failure]]:
    """Prepare every variant mode by mode, so that a mode that runs out of time is missing from all variants."""
    runners: dict[tuple[str, str], Runner] = {}
    failed: list[Failure] = []
    eager: dict[str, Tensor] = {}
    for mode, variant in product(config.modes, VARIANTS):
        if mode != config.modes[0] and clock.now() > deadline:
            failed.append(Failure(variant, mode, f"no time left: the limit is {config.limit:g} s"))
            continue
        tell(f"preparing {variant}, {mode}")
        try:
            runner, output = _prepare_one(config, base, variant, mode, batches, clock)
        except Exception as error:
            # without eager rows of these two there is nothing to compare
            if _is_out_of_memory(error) or (mode == "eager" and variant != "sliced"):
                raise
            failed.append(Failure(variant, mode, _reason(error)))
            tell(f"{variant}, {mode} failed: {_reason(error)}")
            continue
        runners[variant, mode] = runner
        if mode == "eager" and output is not None:
            eager[variant] = output
        elif output is not None and variant in eager:
            runner.difference = relative_error(output, eager[variant])
    return runners, failed


def _prepare_one(
    config: BenchConfig, base: Baseline, variant: str, mode: str, batches: list[Tensor], clock: Clock
) -> tuple[Runner, Tensor | None]:
    """Prepare a variant in a mode, and run its first steps; return its output, too."""
    module = base.variant(variant, own_weights=config.train)
    start = clock.now()
    runner = prepare(mode, module, batches, config.compile_mode, config.autocast_dtype, config.train)
    runner.step(0)
    runner.ready_s = clock.now() - start
    if batches[0].is_cuda:
        runner.peak = _peak(runner, batches[0])
    # not the batch of the first step: a captured graph must read the one it is given
    output = runner.step(len(batches) - 1)
    return runner, None if output is None else output_tensor(output).detach().clone()


def _peak(runner: Runner, batch: Tensor) -> int:
    """Return the peak memory of a step in bytes, as if the model and one batch were alone on the device."""
    runner.step(0)  # the first step may have allocated what stays: workspaces, optimizer state
    torch.cuda.synchronize(batch.device)
    before = torch.cuda.memory_allocated(batch.device)
    torch.cuda.reset_peak_memory_stats(batch.device)
    runner.step(0)
    torch.cuda.synchronize(batch.device)
    used = torch.cuda.max_memory_allocated(batch.device) - before
    used = used if runner.graph is None else runner.graph.peak_bytes
    return used + runner.static_bytes() + batch.nbytes


def _start_compiler(config: BenchConfig, clock: Clock, tell: Tell) -> float | None:
    """Start the compiler on a small function, so that no row pays for it; return the seconds."""
    if not uses_compiler(config.modes):
        return None
    tell("starting the compiler")
    start = clock.now()
    try:
        torch.compile(lambda x: (x.sin() + 1).softmax(-1))(torch.randn(64, 64, device=config.torch_device))
    except Exception:  # the rows report it
        return None
    return clock.now() - start


@contextmanager
def _settings(config: BenchConfig) -> Iterator[None]:
    """Set threads, attention backend and compiler limits during a measurement; explain errors of missing memory."""
    with ExitStack() as stack:
        if config.threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        if config.attention != "auto":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            backends = SDPBackend.__members__.items()
            chosen = next(one for name, one in backends if name.lower().startswith(config.attention))
            # the others are fallbacks for shapes that the chosen backend does not support
            order = [chosen, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
            stack.enter_context(sdpa_kernel(order, set_priority=True))
        if uses_compiler(config.modes):
            stack.enter_context(fresh_compiler(config.cold))
        stack.callback(gc.collect)
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise does_not_fit(config.batch, str(error).splitlines()[0]) from error


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error)


def _reason(error: BaseException) -> str:
    """Return why a mode failed, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@dataclass(frozen=True)
class Timed:
    """Times of one model in one mode.

    Attributes:
        seconds: median time of one step on the whole batch.
        images_per_s: throughput: images, or other samples, per second.
        spread: half the interquartile range over the median.
        samples: number of samples.
    """

    seconds: float
    images_per_s: float
    spread: float
    samples: int


@dataclass(frozen=True)
class ModelTimes:
    """Times of one model.

    Attributes:
        modes: times by mode.
        failed: why the other modes failed.
    """

    modes: dict[str, Timed]
    failed: dict[str, str]

    forms = renamed_property("forms", "modes")

    @property
    def best(self) -> Timed | None:
        """The times of the fastest mode; None if all failed."""
        return min(self.modes.values(), key=lambda timed: timed.seconds, default=None)


@checked
@renamed_arguments(pictures="images", forms="modes")
def time_models(
    models: Mapping[Key, nn.Module],
    images: Tensor | Sequence[Tensor],
    *,
    modes: str | Sequence[str] | Mapping[Key, str | Sequence[str]] = ("eager",),
    seconds: float = 10.0,
    compile_mode: str = "default",
) -> dict[Key, ModelTimes]:
    """Time inference of models, merged or not, in their own dtype and on their own device.

    Copies that share the weights are timed interleaved; the models stay unchanged. A mode that fails records why, and
    the others go on.

    >>> times = time_models({"unmerged": model, "merged": merged}, images)      # doctest: +SKIP
    >>> times["unmerged"].best.seconds / times["merged"].best.seconds           # doctest: +SKIP

    Args:
        models: models by name.
        images: an input batch, or several of one shape to rotate through.
        modes: which of :data:`MODES` to time, for all models or by name; ``blocks`` needs a supported model.
        seconds: time budget for measuring, shared by all models, after warm-up and compilation.
        compile_mode: mode of ``torch.compile``.
    """
    batches = list(images) if isinstance(images, Sequence) else [images]
    _check(models, batches)
    device = batches[0].device
    given = modes if isinstance(modes, Mapping) else dict.fromkeys(models, modes)
    if given.keys() != models.keys():
        raise InvalidOption(
            f"modes has the keys {', '.join(map(repr, given)) or 'nothing'}, but models has "
            f"{', '.join(map(repr, models))}; use the same keys, or give modes for all models"
        )
    wanted = {name: as_tuple(given[name]) for name in models}
    for own in wanted.values():
        check_choices("modes", own, MODES)
    every = {mode for own in wanted.values() for mode in own}
    check_graphs(every, device)
    check_choices("compile_mode", (compile_mode,), COMPILE_MODES)
    check_positive("seconds", seconds)
    steps: dict[tuple[Key, str], Step] = {}
    failed: dict[Key, dict[str, str]] = {name: {} for name in models}
    with torch.cuda.device_of(batches[0]), fresh_compiler() if uses_compiler(every) else nullcontext():
        for name, mode in ((name, mode) for name, own in wanted.items() for mode in own):
            try:
                step = prepare(mode, copy_model(models[name], share=True).eval(), batches, compile_mode).step
                step(0)  # compiles and captures
                steps[name, mode] = step
            except Exception as error:
                failed[name][mode] = _reason(error)
        spreads = measure(steps, Clock(device), seconds, inputs=len(batches))
    times: dict[Key, dict[str, Timed]] = {name: {} for name in models}
    for (name, mode), spread in spreads.items():
        images_per_s = len(batches[0]) / spread.median
        times[name][mode] = Timed(spread.median, images_per_s, spread.relative, spread.samples)
    return {name: ModelTimes(times[name], failed[name]) for name in models}


def _check(models: Mapping[Key, nn.Module], batches: Sequence[Tensor]) -> None:
    """Raise unless these are models by name, and batches of one kind."""
    if not isinstance(models, Mapping) or not models:
        got = "none" if isinstance(models, Mapping) else type(models).__name__
        raise InvalidOption(f'models must be at least one model by name, such as {{"merged": model}}; got {got}')
    kinds = {
        f"{tuple(batch.shape)} in {batch.dtype} on {batch.device}"
        if isinstance(batch, Tensor)
        else type(batch).__name__
        for batch in batches
    }
    is_batch = all(isinstance(batch, Tensor) and batch.dim() >= 4 and len(batch) > 0 for batch in batches)
    if not is_batch or len(kinds) != 1:
        raise UnsupportedInput(
            "images must be a batch, such as (8, 3, 224, 224), or a sequence of batches of one shape, dtype and "
            f"device; got {', '.join(sorted(kinds)) or 'nothing'}. Pass one image as image[None]"
        )
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise InvalidOption(f"model {name!r} is {kind_of(model)}; expected a torch.nn.Module")


def _describe(batch: Tensor) -> str:
    if not isinstance(batch, Tensor):
        return type(batch).__name__
    return f"{tuple(batch.shape)} in {batch.dtype} on {batch.device}"
