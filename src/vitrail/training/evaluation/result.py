"""Result of an evaluation."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from torch import Tensor

from vitrail.analysis.norms import Norms
from vitrail.analysis.result import Result
from vitrail.analysis.roles import Disagreement, Roles


class Evaluation(Result, eq=False):
    """Accuracy of a model and figures about its tokens. Dicts are keyed by head, ``fused`` and ``task.NAME``.

    Attributes:
        count: samples, over all ranks.
        accuracy: top-1 accuracy.
        top5: top-5 accuracy of the fused prediction and of tasks.
        loss: cross-entropy of the fused prediction and of tasks, averaged over targets.
        calibration: expected calibration error in 15 bins, of the fused prediction and of tasks.
        confusion: confusion matrix (true classes in rows), of the fused prediction and of tasks.
        classes: class names of the matrices.
        disagreement: how often heads with the same target differ.
        collapse: cosine similarity of special tokens in the last layer, within and between roles, and collapsed pairs.
        outliers: artifact tokens in the last layer (verdict, share …), and the layer where they begin.
        images_per_s: throughput of the model in batches of ``batch`` on one device; None if not measured.
        batch, device, dtype: how the model ran.
        merge: merge settings; None without merging.
        notes: what could not be measured, and why.
        right: whether each sample was correct (N,), in the order of the data, for paired comparisons; of this rank's
            readable samples.
        roles, norms: details behind ``collapse`` and ``outliers``, of this rank's first samples.
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
        """Figure of merit: accuracy of the fused prediction and of tasks, averaged over targets."""
        return sum(self.accuracy[name] for name in self.classes) / len(self.classes)

    def summary(self) -> dict[str, Any]:
        """Return plain values without confusion matrices and class names, for the log."""
        short = replace(self, confusion={}, classes={}).to_dict()  # large matrices are slow to convert
        return {name: value for name, value in short.items() if name not in ("confusion", "classes")}
