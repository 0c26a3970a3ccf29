"""Measurements on a trained model: norms, probes, dense tasks, and the power of the artifact detector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from experiments.common.study import TrainedModel
from experiments.registers.high_norm_tokens import high_norm_tokens
from experiments.registers.scene_features import SceneFeatures
from experiments.registers.scenes import DataWithScenes
from vitrail.analysis.discovery import corloc, suggest_biases, sweep_lost
from vitrail.analysis.downstream import evaluate_segmentation
from vitrail.analysis.norms import find_threshold
from vitrail.analysis.statistics import split_images
from vitrail.data import Dataset
from vitrail.report.report import Report
from vitrail.training import Labels, Run, read_log

SHARES, RATIOS = (0.005, 0.02), (3, 5, 10)
DRAWS = 10
"""How often artifacts are planted for each share and ratio."""


def measure(run: Run, trained: TrainedModel) -> dict[str, Any]:
    """Measure the tokens of a model on images that it was not trained on."""
    assert isinstance(trained.data, DataWithScenes)
    over_training = [
        {"epoch": line["epoch"], **{name: line["outliers"][name] for name in ("verdict", "outlier_share", "typical")}}
        for line in read_log(run.folder / "log.jsonl", "evaluation")
    ]
    return {"over_training": over_training, **measure_model(trained.model, trained.labels, trained.data.scenes())}


def measure_model(model: nn.Module, labels: Labels, scenes: Dataset) -> dict[str, Any]:
    """Inspect a model, evaluate its features on dense tasks and, if it has artifacts, with test-time registers."""
    report = vitrail.inspect(model, scenes, batch_size=64, discovery=False)
    assert report is not None
    features, cost = SceneFeatures.of(model, labels, scenes), vitrail.count(model)
    found = {
        **report_fields(report),
        "dense": dense_tasks(features),
        "power": detector_power(features.tokens.norm(dim=-1).cpu()),
        "tail": high_norm_tokens(features),
        "flops": cost.flops,
        "flops_per_token": cost.flops_per_token,
    }
    if report.norms["verdict"] == "artifacts" and "neurons" in report.cure:
        dense = dense_tasks_with_registers(model, labels, scenes, report.cure["neurons"])
        found["cure"] = {**report.cure, "dense": dense}
    return found


def report_fields(report: Report) -> dict[str, Any]:
    """Return the part of a report that a row keeps."""
    probes = {name: report.probes[name].get("kinds", report.probes[name]) for name in ("classes", "position", "pixels")}
    return {
        **norm_fields(report.norms),
        "histogram": report.norms["histogram"],
        "probes": probes,
        "registers": report.registers.get("tokens", []),
        "redundancy": report.redundancy if report.norms["outlier_share"] else None,
    }


def norm_fields(norms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a norm analysis, as a dict, that a row keeps: the verdict and each layer."""
    kept = ("verdict", "confidence", "reason", "threshold", "outlier_share", "typical", "onset", "num_images")
    layers = [
        {name: one[name] for name in ("verdict", "confidence", "reason")}
        | {name: one["quantiles"][name] for name in ("50", "99", "max")}
        for one in norms["per_layer"]
    ]
    return {"norms": {name: norms[name] for name in kept}, "layers": layers}


def dense_tasks(features: SceneFeatures) -> dict[str, Any]:
    """Evaluate LOST on keys and on values, and a linear segmentation head trained on half of the scenes."""
    found: dict[str, Any] = {}
    for name, values in (("keys", features.keys), ("values", features.values)):
        grids = [features.grid] * len(values)
        swept = sweep_lost(values, grids, features.boxes, biases=suggest_biases(values[:64]), patch=features.patch)
        found[name] = {"fixed": swept.fixed_setting.share, "held_out": swept.held_out.share}
    height, width = features.masks.shape[1:]
    whole_image = [(0.0, 0.0, float(width), float(height))] * len(features.boxes)
    found["whole_picture"] = corloc(whole_image, features.boxes).share
    split = split_images(len(features.boxes), test_share=0.5, seed=0)
    segmentation = evaluate_segmentation(features.tokens, features.masks, features.grid, split, classes=2)
    return {**found, "miou": segmentation.miou, "pixel_accuracy": segmentation.pixel_accuracy}


def dense_tasks_with_registers(
    model: nn.Module, labels: Labels, scenes: Dataset, neurons: Mapping[Any, list[int]]
) -> dict[str, dict[str, Any]]:
    """Evaluate dense tasks with test-time registers, and with as many random neurons as control."""
    by_layer = {int(layer): some for layer, some in neurons.items()}
    found = {}
    for name, control in (("test-time registers", None), ("random neurons", 0)):
        with vitrail.test_time_registers(model, neurons=by_layer, control=control):
            found[name] = dense_tasks(SceneFeatures.of(model, labels, scenes))
    return found


def detector_power(norms: Tensor) -> dict[str, dict[str, float]]:
    """Return how often the detector finds artifacts planted into these norms, by share of tokens and norm ratio.

    As in ``benchmarks/detector.py``, the norms of randomly chosen tokens are multiplied by the ratio.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for share in SHARES:
        for ratio in RATIOS:
            hits = 0
            for _ in range(DRAWS):
                planted = norms.flatten().clone()
                chosen = torch.randperm(planted.numel(), generator=generator)[: round(share * planted.numel())]
                planted[chosen] *= ratio
                hits += find_threshold(planted).verdict == "artifacts"
            found.setdefault(f"{share:g}", {})[f"{ratio}"] = hits / DRAWS
    return found
