"""BenchResult: the rows of one benchmark, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from vitrail._deprecation import renamed_property
from vitrail.analysis.result import plain
from vitrail.bench._agreement import Check
from vitrail.bench.config import BenchConfig
from vitrail.bench.machine import machine_line
from vitrail.surgery.merging.payoff import BestTime, Payoff

LEGEND = (
    "ms: median time of one step on the whole batch, ± half the interquartile range; all rows are interleaved. "
    "GMACs: 10⁹ multiply-adds of one input. TMAC/s: 10¹² multiply-adds of the model per second; data sheets count two "
    "operations for each. Peak MB: weights, "
    "one batch and what a step allocates (10⁶ bytes; CUDA only). Ready s: from the unchanged model to its first "
    "result, including compilation. Diff: relative distance of the output from the eager one."
)
NOISE = 0.05
"""Rows with a larger relative spread are unreliable."""


@dataclass(frozen=True)
class Row:
    """One variant in one mode.

    Attributes:
        variant, mode: what runs, and how.
        ms: median time of one step on the whole batch, in milliseconds.
        images_per_s: throughput at that time.
        peak_mb: peak memory of a step with the model alone on the device: weights, one batch, and what the step
            allocates; 10⁶ bytes. None on the CPU.
        ready_s: time from the unchanged model to the end of the first step, including compilation.
        ms_low, ms_high: quartiles of the samples.
        ms_least: the minimum; on a shared machine the best estimate of its real speed.
        samples, loops: number of samples, and of steps in each.
        tflops: 10¹² floating-point operations per second (two per multiply-add, three passes in training).
        difference: ‖output − eager output‖ / ‖eager output‖ of the same variant; None for eager and in training.
    """

    variant: str
    mode: str
    ms: float
    images_per_s: float
    peak_mb: float | None
    ready_s: float
    ms_low: float
    ms_high: float
    ms_least: float
    samples: int
    loops: int
    tflops: float
    difference: float | None = None

    form = renamed_property("form", "mode")

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        return (self.ms_high - self.ms_low) / 2 / self.ms


@dataclass(frozen=True)
class Failure:
    """A variant and mode that could not be measured, and why."""

    variant: str
    mode: str
    reason: str

    form = renamed_property("form", "mode")


@dataclass(frozen=True)
class BenchResult:
    """Result of one benchmark.

    Attributes:
        rows: each variant in each mode.
        failed: modes that failed, or that ran out of time.
        size: sides of the input.
        tokens_before, tokens_per_layer: tokens that leave each block without merging, and with it.
        flops_before, flops_after: multiply-adds per image without merging, and with it.
        check: agreement of the merged model with the reference; None without the check.
        kernels: which kernels merged models use, and why.
        startup_s: time to start the compiler, once per process and not part of ``ready_s``; None if unused.
        machine: device, versions and date.
        notes: further remarks.
    """

    config: BenchConfig
    rows: tuple[Row, ...]
    failed: tuple[Failure, ...]
    size: tuple[int, ...]
    tokens_before: int
    tokens_per_layer: tuple[int, ...]
    flops_before: int
    flops_after: int
    check: Check | None
    kernels: dict[str, Any]
    startup_s: float | None
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    def best(self, variant: str, mode: str | None = None) -> Row | None:
        """Return the fastest row of a variant, in any mode or in one; None if there is none."""
        rows = [row for row in self.rows if row.variant == variant and mode in (None, row.mode)]
        return min(rows, key=lambda row: row.ms, default=None)

    def ratio(self, variant: str, mode: str | None = None) -> float | None:
        """Return the time of a variant over that of the merged model, in one mode or each in its best one."""
        other, merged = self.best(variant, mode), self.best("merged", mode)
        return None if other is None or merged is None else other.ms / merged.ms

    @property
    def speedup(self) -> float | None:
        """Time of the unmerged model over time of the merged one, each in its best mode."""
        return self.ratio("unmerged")

    @property
    def efficiency(self) -> float | None:
        """Time of the sliced model over time of the merged one, each in its best mode; at 1, merging is free."""
        return self.ratio("sliced")

    @property
    def flops_ratio(self) -> float:
        """Multiply-adds without merging over those with it: the ideal speed-up, if time followed them."""
        return self.flops_before / self.flops_after

    @property
    def payoff(self) -> Payoff | None:
        """Whether merging saves time here, each side in its best mode; None where one of them is missing."""
        unmerged, merged = self.best("unmerged"), self.best("merged")
        if unmerged is None or merged is None:
            return None
        first, second = (BestTime(row.mode, row.ms / 1e3, row.spread) for row in (unmerged, merged))
        place = f"{self.machine['device']} in {self.config.dtype}"
        return Payoff(self.config.batch, place, first, second, self.flops_ratio)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; numbers that are not finite become None.

        Rows and failures also have the key ``form``, the configuration ``forms`` and the check ``pictures``: names
        from before 0.3 for ``mode``, ``modes`` and ``images``.
        """
        data = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "rows": [{**asdict(row), "form": row.mode} for row in self.rows],
            "failed": [{**asdict(failure), "form": failure.mode} for failure in self.failed],
            "check": None if self.check is None else {**asdict(self.check), "pictures": self.check.images},
            "config": {**asdict(self.config), "forms": self.config.modes},
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "eager_speedup": self.ratio("unmerged", "eager"),
            "eager_efficiency": self.ratio("sliced", "eager"),
            "flops_ratio": self.flops_ratio,
        }
        values: dict[str, Any] = plain(data)
        return values


def title(result: BenchResult) -> str:
    """Return what was measured, in one line."""
    config, size = result.config, " × ".join(map(str, result.size))
    task = "training step (forward, backward, AdamW)" if config.train else "inference"
    weights = "pretrained" if config.pretrained else "random"
    dtype = f"{config.dtype} through autocast" if config.autocast else config.dtype
    return (
        f"{config.model}, {size}, batch {config.batch}, {config.merging_text}, {dtype}, {task}, "
        f"{weights} weights: {result.tokens_before} → {result.tokens_per_layer[-1]} tokens, "
        f"{result.flops_before / 1e9:.3g} → {result.flops_after / 1e9:.3g} GMACs"
    )


def summary(result: BenchResult) -> list[str]:
    """Return sentences about speed-up, efficiency, agreement with the reference, and the machine."""
    lines = [*_ratios(result), *([] if result.check is None else [_agreement(result.check)])]
    noisy = [f"{row.variant}, {row.mode}" for row in result.rows if row.spread > NOISE]
    if noisy:
        lines.append(
            f"Times vary by more than ±{NOISE:.0%} ({'; '.join(noisy)}): the machine is busy, so the ratios are not "
            "reliable. Measure again when it is idle, or for longer."
        )
    lines += [f"{failure.variant}, {failure.mode}: not measured ({failure.reason})." for failure in result.failed]
    if result.startup_s is not None:
        lines.append(f"Starting the compiler took {result.startup_s:.1f} s, once, not included in any row.")
    functions = " functions in PyTorch" if result.kernels["kernels"] == "reference" else ""
    return [
        *lines,
        *(f"{note}." for note in result.notes),
        f"Kernels of the merged model: {result.kernels['kernels']}{functions} ({result.kernels['why']}).",
        f"Machine: {machine_line(result.machine)}.",
        *([] if result.payoff is None else [str(result.payoff)]),
    ]


def _ratios(result: BenchResult) -> list[str]:
    merged, unmerged, sliced = (result.best(variant) for variant in ("merged", "unmerged", "sliced"))
    eager = {variant: result.ratio(variant, "eager") for variant in ("unmerged", "sliced")}
    only = {variant: "" if value is None else f" Eager only: {value:.2f}." for variant, value in eager.items()}
    lines = []
    if merged is not None and unmerged is not None:
        lines.append(
            f"Speed-up {result.speedup:.2f}: merged ({merged.mode}, {merged.ms:.4g} ms) against unmerged "
            f"({unmerged.mode}, {unmerged.ms:.4g} ms), each in its best mode. Ideal by multiply-adds: "
            f"{result.flops_ratio:.2f}.{only['unmerged']}"
        )
    if merged is not None and sliced is not None:
        lines.append(
            f"Efficiency {result.efficiency:.2f}: the same model with tokens cut off for free ({sliced.mode}, "
            f"{sliced.ms:.4g} ms) over merged. At 1, merging is free; below, matching, sizes and unmerging cost time; "
            f"above, the merged model's kernels are faster than the library's.{only['sliced']}"
        )
    return lines


def _agreement(check: Check) -> str:
    gradients = ""
    if check.gradient_error is not None:
        gradients = (
            f" Gradients differ by {check.gradient_error:.1e} (rounding alone: {check.gradient_error_of_dtype:.1e})."
        )
    return (
        f"Against the reference on {check.images} inputs: outputs differ by {check.error:.1e}, and "
        f"{check.equal_groups:.1%} of the patches have exactly the same group. For scale, distance from the reference "
        f"in {check.precise}: {check.error_of_dtype:.1e} for the reference ({check.equal_groups_of_dtype:.1%} equal "
        f"groups), {check.error_precise:.1e} for the merged model ({check.equal_groups_precise:.1%}).{gradients}"
    )
