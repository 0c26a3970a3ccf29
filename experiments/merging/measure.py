"""Accuracy and throughput of a trained model for r from 0 to the cap, merged and with other ways to reduce tokens.

A model is evaluated and timed with the same weights: bfloat16 on a GPU, its own dtype on a CPU. Timing is interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from experiments.common.inputs import batches
from experiments.common.results import pack
from vitrail.adapters import find
from vitrail.bench import copy_model, time_models
from vitrail.training import Labels, evaluate

UNMERGED, MERGED = "unmerged", "merged"
KINDS: dict[str, dict[str, Any]] = {
    MERGED: {},
    "sizes ignored": {"proportional": False},
    "at random": {"method": "random"},
    "pruned": {"method": "prune"},
}
"""Ways to reduce tokens, as options of `vitrail.merge`."""

TIMED = (UNMERGED, MERGED, "sizes ignored")
"""Kinds that are timed. The others have no fast kernels, so their throughput would be meaningless."""

BATCH = 256
SECONDS = 2.0
"""Duration of the interleaved timing after warm-up."""

Setting = tuple[str, int]
"""A kind of reduction, and r."""


def largest_r(model: nn.Module) -> int:
    """Return the cap: the largest r for which every layer still has enough pairs."""
    found = find(model)
    return found.adapter.layout(found.trunk).num_patches // (len(found.blocks) + 1)


def r_values(model: nn.Module, count: int = 5) -> tuple[int, ...]:
    """Return values of r from 0 to the cap in ``count`` equal steps."""
    return tuple(sorted({round(largest_r(model) * step / count) for step in range(count + 1)}))


def trained_with(labels: Labels) -> Setting:
    """Return the setting a model was trained with if all its layers had the same r, else unmerged."""
    r = labels.trained.get("merge", {}).get("r", 0)
    values = set(r if isinstance(r, list) else [r])
    return (MERGED, values.pop()) if len(values) == 1 and any(values) else (UNMERGED, 0)


def measure_merging(
    model: nn.Module, labels: Labels, data: Any, *, seconds: float = SECONDS, batch: int = BATCH
) -> list[dict[str, Any]]:
    """Evaluate and time a trained model unmerged and with every kind of reduction; the model is not changed.

    r goes from 0 to the cap and includes the value the model was trained with. ``r = 0`` merges nothing but uses the
    kernels of merged models: its difference to ``unmerged`` is not due to merging. Nothing is chosen by the results, so
    this counts as one use of the validation set.

    >>> measured = measure_merging(*load_trained("runs/student/last"), imagenette().validation)  # doctest: +SKIP

    Args:
        model: any classifier that `vitrail.merge` supports, in evaluation mode.
        labels: its classes and input specification, as returned by `vitrail.training.load_trained`.
        data: labeled samples.
        seconds: duration of the timing; 0 to skip it.
        batch: batch size.
    """
    copied = copy_model(model, share=False)
    if next(copied.parameters()).is_cuda:
        copied.to(torch.bfloat16)
    values = sorted({*r_values(copied), trained_with(labels)[1]})
    settings = [(UNMERGED, 0), *((kind, r) for kind in KINDS for r in values if r or kind == MERGED)]
    found = {setting: evaluate_at(copied, labels, data, setting, batch) for setting in settings}
    if seconds > 0:
        images, _ = next(batches(copied, labels, data, batch))
        for setting, times in timed(copied, [one for one in settings if one[0] in TIMED], images, seconds).items():
            found[setting] |= times
    return list(found.values())


def merge_at(model: nn.Module, setting: Setting) -> vitrail.Merging:
    """Merge a model at a setting; ``unmerged`` has r = 0."""
    kind, r = setting
    return vitrail.merge(model, r=r, **KINDS.get(kind, {}))


def evaluate_at(model: nn.Module, labels: Labels, data: Any, setting: Setting, batch: int = BATCH) -> dict[str, Any]:
    """Return the correct predictions of a model at a setting, its tokens after the last block, and its cost."""
    with torch.random.fork_rng(), merge_at(model, setting) as merging:
        torch.manual_seed(0)  # for random merging
        tokens, flops = merging.tokens_per_layer()[-1], merging.flops()
        if setting[0] == UNMERGED:
            merging.remove()
        device = next(model.parameters()).device.type
        found = evaluate((model, labels), data, batch=batch, device=device, look=0, seconds=0)
    return {
        "kind": setting[0],
        "r": setting[1],
        "tokens": tokens,
        "gflops": flops / 1e9,
        "accuracy": found.accuracy,
        "correct": {name: pack(one.tolist()) for name, one in found.right.items()},
    }


def timed(
    model: nn.Module, settings: Sequence[Setting], images: Tensor, seconds: float
) -> dict[Setting, dict[str, Any]]:
    """Return the median throughput at each setting by mode, and the error of each mode that failed.

    Copies that share the weights are timed interleaved, in a new random order each round.
    """
    models = {setting: copy_model(model, share=True) for setting in settings}
    for setting, module in models.items():
        if setting[0] != UNMERGED:
            merge_at(module, setting)
    modes = {setting: timing_modes(setting, images.device) for setting in settings}
    found = time_models(models, images, modes=modes, seconds=seconds)
    return {
        setting: {
            "images_per_s": {mode: one.images_per_s for mode, one in times.modes.items()},
            "failed": times.failed,
        }
        for setting, times in found.items()
    }


def timing_modes(setting: Setting, device: torch.device) -> tuple[str, ...]:
    """Return the modes of `vitrail.bench` in which a setting is timed.

    On a GPU all are CUDA graphs; the unmerged model, which uses none of our kernels, is also compiled.
    """
    if device.type != "cuda":
        return ("eager",)
    return ("graph", "blocks-graph") if setting[0] == UNMERGED else ("graph",)


def throughput(one: Mapping[str, Any]) -> float | None:
    """Return the throughput of a measurement in its best mode; None if it was not timed."""
    return max(one.get("images_per_s", {}).values(), default=None)
