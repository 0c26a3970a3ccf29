"""``run``: prepare every variant in every form, check it, and let all of them take turns on the clock."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.bench.check import NO_SWITCH, compare, kernels_used, tensor_error
from vitrail.bench.config import BenchConfig
from vitrail.bench.forms import Runner, compiling, prepare, values_of
from vitrail.bench.machine import describe_machine
from vitrail.bench.models import Base, build, random_batches, try_out
from vitrail.bench.result import BenchResult, Failure, make_row, reason
from vitrail.bench.timing import Clock, clock_for, measure
from vitrail.errors import UnsupportedInput, VitrailWarning

Tell = Callable[[str], object]

NO_MEMORY = "DefaultCPUAllocator"
"""Says who ran out of memory on the CPU, where torch has no error of its own for it."""


@dataclass
class Entry:
    """A variant in a form that has run once."""

    variant: str
    form: str
    runner: Runner
    ready_s: float
    peak: int | None
    difference: float | None


def run(
    config: BenchConfig, *, model: nn.Module | None = None, clock: Clock | None = None, tell: Tell | None = None
) -> BenchResult:
    """Measure a model unmerged, sliced and merged.

    >>> result = run(BenchConfig("timm:vit_base_patch16_224", r=16, batch=256, dtype="bf16"))   # doctest: +SKIP
    >>> result.speedup, result.efficiency                                                       # doctest: +SKIP

    Args:
        config: what to measure.
        model: a model to take instead of loading the one that ``config`` names; it is moved to the device and
            dtype, and not changed otherwise.
        clock: another clock than the device's.
        tell: called with a few words whenever something new begins.
    """
    say = tell or (lambda text: None)
    config.check_here()
    place, notes = config.place, _notes(config)
    clock = clock or clock_for(place)
    with _settings(config), _enough_memory(config):
        began = clock.now()
        say(f"building {config.model}")
        base = build(config, model)
        batches = random_batches(config, base.size, place)
        _start_device(base, config, batches[0])
        startup = _start_compiler(config, place, clock, say)
        check = None
        if config.check:
            say("comparing with the reference")
            check = compare(base, batches[0], autocast=config.autocast_dtype, gradients=config.train)
            notes += [] if check else [NO_SWITCH]
        deadline = None if config.limit is None else began + config.limit
        entries, failed = _prepare_all(config, base, batches, clock, deadline, say)
        say(f"measuring {len(entries)} rows for {config.seconds:g} s")
        steps = {(entry.variant, entry.form): entry.runner.step for entry in entries}
        spreads = measure(steps, clock, config.seconds, inputs=config.inputs)
        machine = describe_machine(place)
        kernels = kernels_used(place)
    rows = [
        make_row(
            config,
            entry.variant,
            entry.form,
            spreads[entry.variant, entry.form],
            base.flops_before if entry.variant == "unmerged" else base.flops_after,
            peak=entry.peak,
            ready_s=entry.ready_s,
            difference=entry.difference,
        )
        for entry in entries
    ]
    return BenchResult(
        config=config,
        rows=tuple(sorted(rows, key=lambda row: (config.variants.index(row.variant), config.forms.index(row.form)))),
        failed=tuple(failed),
        size=base.size,
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


def _prepare_all(
    config: BenchConfig, base: Base, batches: list[Tensor], clock: Clock, deadline: float | None, say: Tell
) -> tuple[list[Entry], list[Failure]]:
    """Bring every variant into every form, form by form, so that what there is no time for is missing in all."""
    entries: list[Entry] = []
    failed: list[Failure] = []
    eager: dict[str, Tensor] = {}
    for form in config.forms:
        for variant in config.variants:
            if form != config.forms[0] and deadline is not None and clock.now() > deadline:
                failed.append(Failure(variant, form, f"no time left: the limit is {config.limit:g} s"))
                continue
            say(f"preparing {variant}, {form}")
            try:
                entry, output = _prepare_one(config, base, variant, form, batches, clock)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error):
                    raise
                if form == "eager" and variant != "sliced":  # without these there is nothing to compare
                    raise
                failed.append(Failure(variant, form, reason(error)))
                say(f"{variant}, {form} failed: {reason(error)}")
                continue
            if output is not None:
                if form == "eager":
                    eager[variant] = output
                elif variant in eager:
                    entry.difference = tensor_error(output, eager[variant])
            entries.append(entry)
    return entries, failed


def _prepare_one(
    config: BenchConfig, base: Base, variant: str, form: str, batches: list[Tensor], clock: Clock
) -> tuple[Entry, Tensor | None]:
    made = base.variant(variant, own_weights=config.train)
    start = clock.now()
    runner = prepare(config, form, made, batches)
    runner.step(0)
    ready = clock.now() - start
    peak = _peak(runner, batches[0])
    # not the batch of the first step: a recorded graph must read the one it is given
    output = runner.step(len(batches) - 1)
    kept = None if output is None else values_of(output).detach().clone()
    return Entry(variant, form, runner, ready, peak, None), kept


def _peak(runner: Runner, batch: Tensor) -> int | None:
    """Give the most bytes that a step needs, as if the model and one batch were alone on the device."""
    if not batch.is_cuda:
        return None
    runner.step(0)  # the first step may have allocated what stays: workspaces, the optimizer's state
    torch.cuda.synchronize(batch.device)
    before = torch.cuda.memory_allocated(batch.device)
    torch.cuda.reset_peak_memory_stats(batch.device)
    runner.step(0)
    torch.cuda.synchronize(batch.device)
    used = torch.cuda.max_memory_allocated(batch.device) - before
    if runner.graph is not None:
        used = runner.graph.held + batch.nbytes
    return used + runner.static() + batch.nbytes


def _start_device(base: Base, config: BenchConfig, batch: Tensor) -> None:
    """Load the device's libraries, so that no row's first step pays for them."""
    try_out(base, config, batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)


def _start_compiler(config: BenchConfig, place: torch.device, clock: Clock, say: Tell) -> float | None:
    """Load and start the compiler on something small, so that no row pays for it alone; gives the seconds."""
    if not config.compiles:
        return None
    say("starting the compiler")
    start = clock.now()
    try:
        torch.compile(_trifle)(torch.randn(64, 64, device=place))
    except Exception:  # the rows will say so
        return None
    return clock.now() - start


def _trifle(x: Tensor) -> Tensor:
    return (x.sin() + 1).softmax(-1)


@contextmanager
def _settings(config: BenchConfig) -> Iterator[None]:
    """Set threads, attention kernels and the compiler's limits for the length of a measurement."""
    with ExitStack() as stack:
        if config.threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        if config.attention != "auto":
            stack.enter_context(_attention(config.attention))
        if config.compiles:
            stack.enter_context(compiling(config.cold))
        stack.callback(gc.collect)
        yield


@contextmanager
def _attention(name: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    # a second choice is left for shapes that the first cannot take
    with sdpa_kernel([kinds[name], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


@contextmanager
def _enough_memory(config: BenchConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
            raise
        raise UnsupportedInput(
            f"batch {config.batch} does not fit into the memory of this device: {str(error).splitlines()[0]} Choose "
            "a smaller batch"
        ) from error


def _notes(config: BenchConfig) -> list[str]:
    notes = []
    if config.place.type == "cpu" and config.dtype == "fp16":
        text = "fp16 on a CPU is computed in other dtypes and is slow; its times say little. Use fp32 or bf16"
        warnings.warn(text, VitrailWarning, stacklevel=3)
        notes.append(text)
    return notes
