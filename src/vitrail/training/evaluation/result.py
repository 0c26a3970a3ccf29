"""What an evaluation found: accuracy of each head and of all together, and what the tokens did meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.norms import NormAccumulator, Norms
from vitrail.analysis.result import Result
from vitrail.analysis.roles import Disagreement, Roles, measure_roles
from vitrail.bench.timing import clock_for, measure
from vitrail.errors import UnsupportedModel, VitrailError
from vitrail.runtime.layout import layout_of
from vitrail.surgery.recording import stream

LOOK_BATCH = 64
"""Pictures at once while tokens are looked at: what is recorded of them has to fit beside a model that trains."""


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """How good a model is on some pictures. Dicts are by answer: each head, ``fused``, and ``task.NAME``.

    Attributes:
        count: pictures, of all processes.
        accuracy: share of right answers.
        top5: share of pictures whose label is among the first five answers; of fused answers and tasks.
        loss: cross-entropy of fused answers and tasks, averaged over questions.
        calibration: expected calibration error in 15 bins; of fused answers and tasks.
        confusion: pictures by true class (rows) and answer (columns); of fused answers and tasks.
        classes: names of the rows and columns.
        disagreement: how often heads for the same question, each token by itself, say something else.
        collapse: cosines of special tokens in the last layer, within and between roles, and pairs as good as one.
        outliers: whether the last layer has artifact tokens (verdict, share …), and since which layer.
        images_per_s: pictures a second through the model alone, in batches of ``batch`` on one device; None if it was
            not timed.
        batch, device, dtype: how the model was run.
        merge: settings of the merge that was in place; None without one.
        notes: what could not be measured, and why.
        right: whether each picture was answered right (N,), in the order of the data, for paired comparisons; of this
            process's pictures that could be read.
        roles, norms: all about ``collapse`` and ``outliers``, of this process's first pictures.
    """

    count: int
    accuracy: dict[str, float]
    top5: dict[str, float]
    loss: float
    calibration: dict[str, float]
    confusion: dict[str, Tensor]
    classes: dict[str, tuple[str, ...]]
    disagreement: Disagreement | None = None
    collapse: dict[str, Any] = field(default_factory=dict)
    outliers: dict[str, Any] = field(default_factory=dict)
    images_per_s: float | None = None
    batch: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    merge: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    right: dict[str, Tensor] = field(default_factory=dict, repr=False, metadata={"json": False})
    roles: Roles | None = field(default=None, repr=False, metadata={"json": False})
    norms: Norms | None = field(default=None, repr=False, metadata={"json": False})

    @property
    def score(self) -> float:
        """The one number to compare models by: accuracy of fused answers and tasks, averaged over questions."""
        return sum(self.accuracy[name] for name in self.classes) / len(self.classes)

    def summary(self) -> dict[str, Any]:
        """Give plain values without the large ones: for a line of a log."""
        short = replace(self, confusion={}, classes={}).to_dict()  # tables of many classes take long to write down
        return {name: value for name, value in short.items() if name not in ("confusion", "classes")}


@dataclass(frozen=True)
class Looked:
    """What the tokens of a model did: the measures, their short forms for logs, and what could not be measured."""

    roles: Roles | None = None
    norms: Norms | None = None
    notes: tuple[str, ...] = ()

    @property
    def collapse(self) -> dict[str, Any]:
        """How alike the special tokens are: by roles, of the last layer and of the parameters."""
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
        """Whether there are artifact tokens in the last layer, how many, and how large."""
        if self.norms is None:
            return {}
        kept = ("verdict", "outlier_share", "confidence", "threshold", "typical", "ratio", "onset", "num_pictures")
        return {name: getattr(self.norms, name) for name in kept}


def look_at(model: nn.Module, pictures: Tensor) -> Looked:
    """Measure redundancy of special tokens and norms of patches on some prepared pictures.

    A model that Vitrail cannot reach into, a convolutional net say, has none of it, and nothing to note. A model that
    has patches alone has norms and no roles.
    """
    try:
        special = layout_of(find(model)).num_special
    except UnsupportedModel:
        return Looked()
    notes: list[str] = []

    def tried(what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except VitrailError as error:
            notes.append(f"{what}: {error}")

    norms = tried("norms", lambda: _norms(model, pictures))
    roles = tried("roles", lambda: measure_roles(model, pictures, batch_size=LOOK_BATCH)) if special else None
    return Looked(roles, norms, tuple(notes))


def throughput(model: nn.Module, images: Tensor, seconds: float, dtype: torch.dtype | None = None) -> float:
    """Time a model on one batch that lies on its device, warmed up, until the device is done: pictures a second."""

    def step(_: int) -> None:
        with torch.no_grad(), autocast(images.device, dtype):
            model(images)

    taken = measure({"model": step}, clock_for(images.device), seconds)["model"]
    return len(images) / taken.median


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Have matrix products in a dtype; None for as they are."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype not in (None, torch.float32))


def _norms(model: nn.Module, pictures: Tensor) -> Norms:
    found: NormAccumulator | None = None
    for seen in stream(model, pictures, "norms", batch_size=LOOK_BATCH, device="cpu"):
        found = found or NormAccumulator(len(seen.layers))
        found.add(torch.stack([seen.norms[layer][:, seen.layout.patches] for layer in seen.layers]))
    assert found is not None
    return found.result()
