"""What is noted about a trained model: norms, what tokens hold, dense tasks, and what the detector could have seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from experiments.common.study import Trained
from experiments.registers import tail
from experiments.registers.scenes import WithScenes
from experiments.registers.seen import Seen
from vitrail.analysis.discovery import corloc, suggest_biases, sweep_lost
from vitrail.analysis.downstream import evaluate_segmentation
from vitrail.analysis.norms import find_threshold
from vitrail.analysis.statistics import split_images
from vitrail.data.collection import Collection
from vitrail.report.report import Report
from vitrail.training import Labels, Run, read_log

SHARES, RATIOS = (0.005, 0.02), (3, 5, 10)
DRAWS = 10
"""How often artifacts are planted for each share and ratio."""


def look(run: Run, trained: Trained) -> dict[str, Any]:
    """Note all about the tokens of a model; on pictures that it was not trained on, and nothing is chosen by them."""
    assert isinstance(trained.data, WithScenes)
    over = [
        {"epoch": line["epoch"], **{name: line["outliers"][name] for name in ("verdict", "outlier_share", "typical")}}
        for line in read_log(run.folder / "log.jsonl", "evaluation")
    ]
    return {"over_training": over, **examine(trained.model, trained.labels, trained.data.scenes())}


def examine(model: nn.Module, labels: Labels, scenes: Collection) -> dict[str, Any]:
    """Inspect a model, put its features to use, and where it has artifacts try to cure it."""
    report = vitrail.inspect(model, scenes, batch_size=64, discovery=False)
    assert report is not None
    seen, counted = Seen.by(model, labels, scenes), vitrail.count(model)
    found = {
        **told(report),
        "dense": dense(seen),
        "power": power(seen.tokens.norm(dim=-1).cpu()),
        "tail": tail.of(seen),
        "flops": counted.flops,
        "flops_per_token": counted.flops_per_token,
    }
    if report.norms["verdict"] == "artifacts" and "neurons" in report.cure:
        found["cure"] = {**report.cure, "dense": cured(model, labels, scenes, report.cure["neurons"])}
    return found


def told(report: Report) -> dict[str, Any]:
    """Take from a report what a row keeps."""
    probes = {name: report.probes[name].get("kinds", report.probes[name]) for name in ("classes", "position", "pixels")}
    return {
        **norms_told(report.norms),
        "histogram": report.norms["histogram"],
        "probes": probes,
        "registers": report.registers.get("tokens", []),
        "redundancy": report.redundancy if report.norms["outlier_share"] else None,
    }


def norms_told(norms: Mapping[str, Any]) -> dict[str, Any]:
    """Take from norms, as plain values, what a row keeps: the verdict, and each layer."""
    kept = ("verdict", "confidence", "reason", "threshold", "outlier_share", "typical", "onset", "num_pictures")
    layers = [
        {name: one[name] for name in ("verdict", "confidence", "reason")}
        | {name: one["quantiles"][name] for name in ("50", "99", "max")}
        for one in norms["per_layer"]
    ]
    return {"norms": {name: norms[name] for name in kept}, "layers": layers}


def dense(seen: Seen) -> dict[str, Any]:
    """Find objects with LOST by keys and by values, and fit a linear map from half of the scenes' patches to masks."""
    found: dict[str, Any] = {}
    for name, features in (("keys", seen.keys), ("values", seen.values)):
        grids = [seen.grid] * len(features)
        swept = sweep_lost(features, grids, seen.boxes, biases=suggest_biases(features[:64]), patch=seen.patch)
        found[name] = {"fixed": swept.fixed_setting.share, "held_out": swept.held_out.share}
    height, width = seen.masks.shape[1:]
    found["whole_picture"] = corloc([(0.0, 0.0, float(width), float(height))] * len(seen.boxes), seen.boxes).share
    split = split_images(len(seen.boxes), test_share=0.5, seed=0)
    segmented = evaluate_segmentation(seen.tokens, seen.masks, seen.grid, split, classes=2)
    return {**found, "miou": segmented.miou, "pixel_accuracy": segmented.pixel_accuracy}


def cured(
    model: nn.Module, labels: Labels, scenes: Collection, neurons: Mapping[Any, list[int]]
) -> dict[str, dict[str, Any]]:
    """Put features to use while test-time registers take the artifacts, and while random neurons are moved instead."""
    by_layer = {int(layer): some for layer, some in neurons.items()}
    found = {}
    for name, control in (("test-time registers", None), ("random neurons", 0)):
        with vitrail.test_time_registers(model, neurons=by_layer, control=control):
            found[name] = dense(Seen.by(model, labels, scenes))
    return found


def power(norms: Tensor) -> dict[str, dict[str, float]]:
    """Say how often the detector would have found artifacts of each share and ratio, had these norms had them.

    As in ``benchmarks/detector_power.py``, tokens drawn at random get a multiple of their own norm. Norms that have
    artifacts already are found as they are.
    """
    draw = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for share in SHARES:
        for ratio in RATIOS:
            hits = 0
            for _ in range(DRAWS):
                planted = norms.flatten().clone()
                chosen = torch.randperm(planted.numel(), generator=draw)[: round(share * planted.numel())]
                planted[chosen] *= ratio
                hits += find_threshold(planted).verdict == "artifacts"
            found.setdefault(f"{share:g}", {})[f"{ratio}"] = hits / DRAWS
    return found
