"""What a result says, in sentences."""

from __future__ import annotations

from typing import Any

from vitrail.bench.check import Check
from vitrail.bench.machine import in_words
from vitrail.bench.result import BenchResult

LEGEND = (
    "ms: median of one step over the whole batch, ± half of the width of the middle half of the samples; all rows "
    "took turns. TFLOP/s: the model's own operations, two for each multiply-add. Peak MB: weights, one batch and what "
    "a step allocates (10⁶ bytes; on CUDA). Ready s: from the untouched model to its first result, compilation "
    "included. Diff: how far the output is from the eager one, relative."
)
NOISE = 0.05
"""Rows that spread more than this are not to be relied on."""


def title(result: BenchResult) -> str:
    """Say what was measured."""
    config, (height, width) = result.config, result.size
    r = config.r if isinstance(config.r, int) else " ".join(map(str, config.r))
    sizes = "" if config.proportional else ", sizes ignored"
    what = "training step (forward, backward, AdamW)" if config.train else "inference"
    weights = "pretrained" if config.pretrained else "random"
    dtype = f"{config.dtype} through autocast" if config.autocast else config.dtype
    return (
        f"{config.model}, {height} × {width}, batch {config.batch}, r = {r}{sizes}, {dtype}, {what}, "
        f"{weights} weights: {result.tokens_before} → {result.tokens_per_layer[-1]} tokens, "
        f"{result.flops_before / 1e9:.3g} → {result.flops_after / 1e9:.3g} GFLOPs"
    )


def sentences(result: BenchResult) -> list[str]:
    """Say what the rows mean, whether the outputs are right, and what was used."""
    lines = [*_speedup(result), *_efficiency(result), *_check(result.check)]
    noisy = [f"{row.variant}, {row.form}" for row in result.rows if row.spread > NOISE]
    if noisy:
        lines.append(
            f"Times vary by more than ±{NOISE:.0%} ({'; '.join(noisy)}): something else wants this "
            "machine, so do not rely on the ratios. Measure again when it is quiet, or for longer."
        )
    lines += [f"{failure.variant}, {failure.form}: not measured ({failure.reason})." for failure in result.failed]
    if result.startup_s is not None:
        lines.append(f"Starting the compiler took {result.startup_s:.1f} s, once, which is in no row.")
    lines += [f"{note}." for note in result.notes]
    lines.append(f"Kernels of the merged model: {_kernels(result.kernels)}.")
    lines.append(f"Machine: {in_words(result.machine)}.")
    return lines


def _speedup(result: BenchResult) -> list[str]:
    merged, other = result.best("merged"), result.best("unmerged")
    if merged is None or other is None or result.speedup is None:
        return []
    return [
        f"Speed-up {result.speedup:.2f}: merged ({merged.form}, {merged.ms:.4g} ms) against unmerged ({other.form}, "
        f"{other.ms:.4g} ms), each in its best form. It would be {result.flops_ratio:.2f} if time followed "
        f"multiply-adds.{_eager(result.eager_speedup)}"
    ]


def _efficiency(result: BenchResult) -> list[str]:
    merged, other = result.best("merged"), result.best("sliced")
    if merged is None or other is None or result.efficiency is None:
        return []
    return [
        f"Efficiency {result.efficiency:.2f}: the same model with tokens cut off for free ({other.form}, "
        f"{other.ms:.4g} ms) over merged. At 1, merging costs nothing; below, matching, sizes and unmerging cost the "
        f"rest; above, the merged model's kernels beat the library's.{_eager(result.eager_efficiency)}"
    ]


def _eager(value: float | None) -> str:
    return "" if value is None else f" Eager only: {value:.2f}."


def _check(check: Check | None) -> list[str]:
    if check is None:
        return []
    lines = [
        f"Against the reference on {check.pictures} pictures: outputs differ by {check.error:.1e}, and "
        f"{check.equal_groups:.1%} of the patches have exactly the same group. For scale: from "
        f"the reference in {check.precise}, rounding takes the reference {check.error_of_dtype:.1e} away "
        f"({check.equal_groups_of_dtype:.1%} of the groups), and the merged model {check.error_precise:.1e} "
        f"({check.equal_groups_precise:.1%})."
    ]
    if check.gradient_error is not None:
        scale = (
            "" if check.gradient_error_of_dtype is None else f" (rounding alone: {check.gradient_error_of_dtype:.1e})"
        )
        lines.append(f"Gradients differ by {check.gradient_error:.1e}{scale}.")
    return lines


def _kernels(kernels: Any) -> str:
    if isinstance(kernels, dict) and set(kernels) == {"kernels", "why"}:
        functions = " functions in PyTorch" if kernels["kernels"] == "reference" else ""
        return f"{kernels['kernels']}{functions} ({kernels['why']})"
    if isinstance(kernels, dict):
        return ", ".join(f"{name}: {value}" for name, value in kernels.items())
    if isinstance(kernels, list | tuple):
        return ", ".join(map(str, kernels))
    return str(kernels).rstrip(".")
