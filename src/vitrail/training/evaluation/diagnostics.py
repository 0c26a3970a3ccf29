"""Diagnostics beside accuracy: collapse of special tokens, artifact tokens, throughput."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._timing import Clock, measure
from vitrail.adapters import find
from vitrail.analysis.norms import NormAccumulator
from vitrail.analysis.roles import Roles, measure_roles
from vitrail.errors import UnsupportedModel, VitrailError
from vitrail.runtime.layout import layout_of
from vitrail.surgery.recording import stream

BATCH = 64
"""Batch size of the diagnostics; the recordings have to fit in memory next to a model in training."""

NORM_FIGURES = ("verdict", "outlier_share", "confidence", "threshold", "typical", "ratio", "onset", "num_images")


def diagnose_tokens(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Return fields of `Evaluation`: redundancy of special tokens, norms of patches, what could not be measured.

    There are none for models without an adapter, such as convnets, and no roles for models without special tokens.
    """
    try:
        special = layout_of(find(model)).num_special
    except UnsupportedModel:
        return {}
    fields: dict[str, Any] = {}
    notes = []
    try:
        found: NormAccumulator | None = None
        for seen in stream(model, images, ("entry", "norms"), batch_size=BATCH, device="cpu"):
            found = (found or NormAccumulator(len(seen.layers))).add_recording(seen)
        if found is not None:
            norms = found.result()
            fields |= {"norms": norms, "outliers": {name: getattr(norms, name) for name in NORM_FIGURES}}
    except VitrailError as error:
        notes.append(f"norms: {error}")
    try:
        if special:
            roles = measure_roles(model, images, batch_size=BATCH)
            fields |= {"roles": roles, "collapse": _collapse(roles)}
    except VitrailError as error:
        notes.append(f"roles: {error}")
    return {**fields, "notes": tuple(notes)}


def _collapse(roles: Roles) -> dict[str, Any]:
    """Return the cosine similarity of special tokens in the last layer and of their parameters."""
    values: dict[str, Any] = {
        "within": {name: value[-1].item() for name, value in roles.cosines.within.items()},
        "between": {name: value[-1].item() for name, value in roles.cosines.between.items()},
    }
    learned = roles.parameters
    if learned is not None and len(learned.tokens) > 1:
        upper = [learned.matrix[i, j].item() for i, j in combinations(range(len(learned.tokens)), 2)]
        values["parameters"] = {"mean": sum(upper) / len(upper), "max": max(upper)}
    return {**values, "pairs": [f"{one.first}, {one.second} ({one.where})" for one in roles.collapsed]}


def throughput(model: nn.Module, images: Tensor, seconds: float, dtype: torch.dtype | None = None) -> float:
    """Return images per second on one batch that lies on the model's device, after a warm-up."""

    def step(_: int) -> None:
        with torch.no_grad(), autocast(images.device, dtype):
            model(images)

    return len(images) / measure({"model": step}, Clock(images.device), seconds)["model"].median


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return an autocast context; None and float32 disable it."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype not in (None, torch.float32))
