"""Diagnostics beside accuracy: collapse of special tokens, artifact tokens, throughput."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.norms import NormAccumulator, Norms
from vitrail.analysis.roles import Roles, measure_roles
from vitrail.bench.timing import Clock, measure
from vitrail.errors import UnsupportedModel, VitrailError
from vitrail.runtime.layout import layout_of
from vitrail.surgery.recording import stream

BATCH = 64
"""Batch size of the diagnostics; the recordings have to fit in memory next to a model in training."""


@dataclass(frozen=True)
class TokenDiagnostics:
    """Redundancy of special tokens, norms of patches, and what could not be measured."""

    roles: Roles | None = None
    norms: Norms | None = None
    notes: tuple[str, ...] = ()

    @property
    def collapse(self) -> dict[str, Any]:
        """Cosine similarity of special tokens in the last layer and of their parameters."""
        if self.roles is None:
            return {}
        cosines, pairs = self.roles.cosines, self.roles.collapsed
        values: dict[str, Any] = {
            "within": {name: value[-1].item() for name, value in cosines.within.items()},
            "between": {name: value[-1].item() for name, value in cosines.between.items()},
        }
        learned = self.roles.parameters
        if learned is not None and len(learned.tokens) > 1:
            upper = [learned.matrix[i, j].item() for i, j in combinations(range(len(learned.tokens)), 2)]
            values["parameters"] = {"mean": sum(upper) / len(upper), "max": max(upper)}
        return {**values, "pairs": [f"{one.first}, {one.second} ({one.where})" for one in pairs]}

    @property
    def outliers(self) -> dict[str, Any]:
        """Artifact tokens in the last layer: verdict, share and norms."""
        if self.norms is None:
            return {}
        kept = ("verdict", "outlier_share", "confidence", "threshold", "typical", "ratio", "onset", "num_pictures")
        return {name: getattr(self.norms, name) for name in kept}


def diagnose_tokens(model: nn.Module, images: Tensor) -> TokenDiagnostics:
    """Measure redundancy of special tokens and norms of patches on prepared images.

    The result is empty for models without an adapter, such as convnets, and has no roles for models without special
    tokens.
    """
    try:
        special = layout_of(find(model)).num_special
    except UnsupportedModel:
        return TokenDiagnostics()
    norms, roles, notes = None, None, []
    try:
        found: NormAccumulator | None = None
        for seen in stream(model, images, "norms", batch_size=BATCH, device="cpu"):
            found = found or NormAccumulator(len(seen.layers))
            found.add(torch.stack([seen.norms[layer][:, seen.layout.patches] for layer in seen.layers]))
        norms = None if found is None else found.result()
    except VitrailError as error:
        notes.append(f"norms: {error}")
    try:
        roles = measure_roles(model, images, batch_size=BATCH) if special else None
    except VitrailError as error:
        notes.append(f"roles: {error}")
    return TokenDiagnostics(roles, norms, tuple(notes))


def throughput(model: nn.Module, images: Tensor, seconds: float, dtype: torch.dtype | None = None) -> float:
    """Return images per second on one batch that lies on the model's device, after a warm-up."""

    def step(_: int) -> None:
        with torch.no_grad(), autocast(images.device, dtype):
            model(images)

    return len(images) / measure({"model": step}, Clock(images.device), seconds)["model"].median


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return an autocast context; None and float32 disable it."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype not in (None, torch.float32))
