"""Result of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
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
        images_per_s: throughput of the model in batches of ``batch`` on one device, in images, clips or sounds; None if
            not measured.
        batch, device, dtype: how the model ran.
        merge: merge settings; None without merging.
        notes: what could not be measured, and why.
        rmse, mae: root mean squared and mean absolute error of values, in the units of the labels.
        r2: R² of values: 1 for a perfect prediction, 0 for that of their mean; None where all values are equal.
        mean_ap, ap: mean average precision of several classes at once, and that of each class.
        miou, iou: mean intersection over union of masks, and that of each class; their accuracy is that of pixels.
        right: whether each sample was correct (N,), in the order of the data, for paired comparisons; of this rank's
            readable samples.
        modality: what samples are, as in `vitrail.InputSpec`.
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
    rmse: dict[str, float] = field(default_factory=dict)
    mae: dict[str, float] = field(default_factory=dict)
    r2: dict[str, float | None] = field(default_factory=dict)
    mean_ap: dict[str, float | None] = field(default_factory=dict)
    ap: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    miou: dict[str, float | None] = field(default_factory=dict)
    iou: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    modality: str = "image"
    roles: Roles | None = field(default=None, repr=False, metadata={"json": False})
    norms: Norms | None = field(default=None, repr=False, metadata={"json": False})

    @property
    def score(self) -> float:
        """Figure of merit, averaged over targets: accuracy of the fused prediction and of tasks.

        Of values it is R², of several classes at once the mean average precision, of masks the mean intersection over
        union.
        """
        return sum(self._merit(name) for name in self.classes) / len(self.classes)

    def _merit(self, name: str) -> float:
        for figures in (self.r2, self.mean_ap, self.miou):
            if name in figures:
                return figures[name] or 0.0
        return self.accuracy[name]

    @property
    def headlines(self) -> list[str]:
        """The main figures as text, one for each head and target."""
        return headlines(vars(self))

    def summary(self) -> dict[str, Any]:
        """Return plain values without confusion matrices and class names, for the log."""
        short = replace(self, confusion={}, classes={}).to_dict()  # large matrices are slow to convert
        return {name: value for name, value in short.items() if name not in ("confusion", "classes")}


def headlines(values: Mapping[str, Any]) -> list[str]:
    """Return the main figures of an evaluation, or of its :meth:`Evaluation.summary`, as text."""
    others = {"mean_ap": "mAP", "miou": "mIoU"}
    covered = {name for kind in others for name in values.get(kind) or ()}
    found = [f"{name} {100 * share:.2f} %" for name, share in values["accuracy"].items() if name not in covered]
    for kind, title in others.items():
        found += [f"{name} {title} {_percent(share)}" for name, share in (values.get(kind) or {}).items()]
    for name, error in (values.get("rmse") or {}).items():
        r2 = (values.get("r2") or {}).get(name)
        found.append(f"{name} RMSE {error:.4g}" + ("" if r2 is None else f", R² {r2:.3f}"))
    return found


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"
