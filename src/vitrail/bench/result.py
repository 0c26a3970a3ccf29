"""BenchResult: the rows of one measurement and what they say, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitrail.bench.check import Check
from vitrail.bench.config import BenchConfig
from vitrail.bench.timing import Spread


@dataclass(frozen=True)
class Row:
    """One variant in one form.

    Attributes:
        variant: unmerged, sliced or merged.
        form: how it is run.
        ms: median of one step over the whole batch, in milliseconds.
        images_per_s: pictures in a second, at that.
        peak_mb: most memory in use in a step, as if nothing else were on the device: weights, one batch, and what
            the step allocates; 10⁶ bytes. None on the CPU.
        ready_s: from the untouched model to the end of the first step, compilation included.
        ms_low: a quarter of the samples is below.
        ms_high: a quarter is above.
        ms_least: the smallest sample; on a machine that others use, the best guess at its real speed.
        samples: how many samples there are.
        loops: steps in each sample.
        tflops: 10¹² floating-point operations in a second (two for each multiply-add, three passes in training).
        difference: ‖output − eager output‖ / ‖eager output‖ of the same variant; None for eager and in training.
    """

    variant: str
    form: str
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

    @property
    def spread(self) -> float:
        """Half of the width of the middle half of the samples, over the median."""
        return (self.ms_high - self.ms_low) / 2 / self.ms


@dataclass(frozen=True)
class Failure:
    """A form that could not be had, and why; it counts for nothing."""

    variant: str
    form: str
    reason: str


@dataclass(frozen=True)
class BenchResult:
    """What one measurement found.

    Attributes:
        rows: each variant in each form.
        failed: forms that failed, or that there was no time for.
        size: height and width of the pictures.
        tokens_before: tokens in each layer without merging.
        tokens_per_layer: tokens that leave each block, merged.
        flops_before: multiply-adds for one picture without merging.
        flops_after: with merging.
        check: the merged model against the reference; None where there is nothing to compare.
        kernels: what merged models compute with.
        startup_s: starting the compiler, once in a process and in no row's ``ready_s``; None where not needed.
        machine: device, versions and date.
        notes: what else there is to know.
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
    kernels: Any
    startup_s: float | None
    machine: dict[str, Any]
    notes: tuple[str, ...] = field(default=())

    def best(self, variant: str, form: str | None = None) -> Row | None:
        """Give the fastest row of a variant, in any form or in one."""
        rows = [row for row in self.rows if row.variant == variant and form in (None, row.form)]
        return min(rows, key=lambda row: row.ms, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the unmerged model the merged one is, each in its best form."""
        return self._ratio("unmerged")

    @property
    def efficiency(self) -> float | None:
        """Time of the sliced model over time of the merged one, each in its best form; 1 is merging for free."""
        return self._ratio("sliced")

    @property
    def eager_speedup(self) -> float | None:
        """The speed-up without compiling or recording."""
        return self._ratio("unmerged", "eager")

    @property
    def eager_efficiency(self) -> float | None:
        """The efficiency without compiling or recording."""
        return self._ratio("sliced", "eager")

    @property
    def flops_ratio(self) -> float:
        """How many times fewer multiply-adds there are with merging: the speed-up if time followed them."""
        return self.flops_before / self.flops_after

    def _ratio(self, variant: str, form: str | None = None) -> float | None:
        other, merged = self.best(variant, form), self.best("merged", form)
        return None if other is None or merged is None else other.ms / merged.ms

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data for JSON; what is not a finite number is None."""
        data = {
            "rows": [asdict(row) for row in self.rows],
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "eager_speedup": self.eager_speedup,
            "eager_efficiency": self.eager_efficiency,
            "flops_ratio": self.flops_ratio,
            "flops_before": self.flops_before,
            "flops_after": self.flops_after,
            "tokens_before": self.tokens_before,
            "tokens_per_layer": self.tokens_per_layer,
            "size": self.size,
            "check": None if self.check is None else asdict(self.check),
            "kernels": self.kernels,
            "startup_s": self.startup_s,
            "failed": [asdict(failure) for failure in self.failed],
            "notes": self.notes,
            "config": asdict(self.config),
            "machine": self.machine,
        }
        plain: dict[str, Any] = _plain(data)
        return plain


def make_row(
    config: BenchConfig,
    variant: str,
    form: str,
    spread: Spread,
    flops: int,
    *,
    peak: int | None,
    ready_s: float,
    difference: float | None = None,
) -> Row:
    """Turn what was measured for one variant and form into a row."""
    passes = 3 if config.train else 1
    return Row(
        variant=variant,
        form=form,
        ms=spread.median * 1e3,
        images_per_s=config.batch / spread.median,
        peak_mb=None if peak is None else peak / 1e6,
        ready_s=ready_s,
        ms_low=spread.low * 1e3,
        ms_high=spread.high * 1e3,
        ms_least=spread.least * 1e3,
        samples=spread.samples,
        loops=spread.loops,
        tflops=2 * flops * config.batch * passes / spread.median / 1e12,
        difference=difference,
    )


def reason(error: BaseException) -> str:
    """Say in one line why a form failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
