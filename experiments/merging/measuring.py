"""What merging does to a trained model: accuracy and measured throughput, for r from 0 to the cap.

Beside it, other ways to have as few tokens. A model is scored and timed with weights of one dtype: bfloat16 on a GPU,
its own on a CPU. All that is timed takes turns on the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from experiments.common.rows import pack
from experiments.common.scoring import batches
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
"""Ways to have fewer tokens, as options of `vitrail.merge`."""

TIMED = (UNMERGED, MERGED, "sizes ignored")
"""What is timed. The other ways have no fast kernels: their time would say nothing about them."""

BATCH = 256
SECONDS = 2.0
"""How long all take turns on the clock, after each has warmed up."""

Setting = tuple[str, int]
"""A way to have fewer tokens, and r."""


def most(model: nn.Module) -> int:
    """Give the cap: the largest r that every layer still has pairs for."""
    found = find(model)
    return found.adapter.layout(found.trunk).num_patches // (len(found.blocks) + 1)


def steps(model: nn.Module, count: int = 5) -> tuple[int, ...]:
    """Give values of r from 0 to the cap, in so many equal steps."""
    return tuple(sorted({round(most(model) * step / count) for step in range(count + 1)}))


def trained_with(labels: Labels) -> Setting:
    """Give the setting that a model was trained at, where its layers all had one r; else unmerged."""
    told = labels.trained.get("merge", {}).get("r", 0)
    values = set(told if isinstance(told, list) else [told])
    return (MERGED, values.pop()) if len(values) == 1 and any(values) else (UNMERGED, 0)


def measure_merging(
    model: nn.Module, labels: Labels, data: Any, *, seconds: float = SECONDS, batch: int = BATCH
) -> list[dict[str, Any]]:
    """Score and time a trained model unmerged and with every kind of merging; the model stays as it is.

    r goes from 0 to the cap, and is also what the model was trained with. ``r = 0`` merges nothing, by the kernels of
    the merged model: what is between it and ``unmerged`` is not due to merging. Nothing is chosen by what comes out, so
    that this is one look at the data.

    >>> measured = measure_merging(*load_trained("runs/student/last"), imagenette().validation)  # doctest: +SKIP

    Args:
        model: any classifier that `vitrail.merge` takes, where it is and in evaluation mode.
        labels: its classes and what it expects, as `vitrail.training.load_trained` gives them.
        data: labelled pictures.
        seconds: how long to time; 0 for not at all.
        batch: pictures at once.
    """
    served = copy_model(model, share=False)
    if next(served.parameters()).is_cuda:
        served.to(torch.bfloat16)
    values = sorted({*steps(served), trained_with(labels)[1]})
    settings = [(UNMERGED, 0), *((kind, r) for kind in KINDS for r in values if r or kind == MERGED)]
    found = {setting: scored(served, labels, data, setting, batch) for setting in settings}
    if seconds > 0:
        pictures, _ = next(batches(served, labels, data, batch))
        for setting, told in timed(served, [one for one in settings if one[0] in TIMED], pictures, seconds).items():
            found[setting] |= told
    return list(found.values())


def merged_by(model: nn.Module, setting: Setting) -> vitrail.Merging:
    """Merge a model as a setting says; nothing merges where that is ``unmerged``."""
    kind, r = setting
    return vitrail.merge(model, r=r, **KINDS.get(kind, {}))


def scored(model: nn.Module, labels: Labels, data: Any, setting: Setting, batch: int = BATCH) -> dict[str, Any]:
    """Say what a model gets right at a setting, how many tokens leave its last block, and what a picture costs."""
    with torch.random.fork_rng(), merged_by(model, setting) as merging:
        torch.manual_seed(0)  # for merging at random
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
    model: nn.Module, settings: Sequence[Setting], pictures: Tensor, seconds: float
) -> dict[Setting, dict[str, Any]]:
    """Give pictures per second at each setting by form, from medians; a form that fails says why instead.

    Copies that share the weights take turns, in an order drawn anew each round.
    """
    models = {setting: copy_model(model, share=True) for setting in settings}
    for setting, module in models.items():
        if setting[0] != UNMERGED:
            merged_by(module, setting)
    chosen = {setting: forms(setting, pictures.device) for setting in settings}
    found = time_models(models, pictures, modes=chosen, seconds=seconds)
    return {
        setting: {
            "images_per_s": {form: one.images_per_s for form, one in times.modes.items()},
            "failed": times.failed,
        }
        for setting, times in found.items()
    }


def forms(setting: Setting, device: torch.device) -> tuple[str, ...]:
    """Name the forms of `vitrail.bench` that a setting is timed in.

    On a GPU all are recorded as CUDA graphs, and the unmerged model, which has no kernels of ours, is compiled, too.
    """
    if device.type != "cuda":
        return ("eager",)
    return ("graph", "blocks-graph") if setting[0] == UNMERGED else ("graph",)


def speed(one: Mapping[str, Any]) -> float | None:
    """Give the pictures per second of a measurement, in its best form; None where it was not timed."""
    return max(one.get("images_per_s", {}).values(), default=None)
