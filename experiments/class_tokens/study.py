"""One, two and four class tokens that share a loss, with equal, nearly equal and different initial values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.common.datasets import imagenette
from experiments.common.inputs import all_inputs
from experiments.common.plots import COLORS, dots, figure, legend, lines
from experiments.common.results import by_arm
from experiments.common.study import Arm, Column, Rows, Study, TrainedModel
from vitrail.analysis.roles import measure_roles
from vitrail.models import ViT
from vitrail.tokens import Role, TokenSpec
from vitrail.training import Run, read_log

COUNTS = (1, 2, 4)
STDS = ("0", "1e-6", ".02")
ADAMW = ".02, AdamW"
"""Different initial values with the optimizer of the papers: a separate comparison with its own search."""
STYLES: dict[str, dict[str, Any]] = {  # curves overlap, so the lower ones are wider
    f"{count} × std {std}": {"color": color, "linewidth": width, "linestyle": dash}
    for std, color, width in zip((*STDS, ADAMW), COLORS, (5.0, 2.6, 1.6, 1.6), strict=False)
    for count, dash in zip(COUNTS, (":", "-", "--"), strict=True)
}


def tokens(count: int, std: float) -> tuple[TokenSpec, ...]:
    """Return class tokens that share a head, without position embeddings, which would add another initialization."""
    return (TokenSpec("cls", Role.CLASS, count, std=std, position=False),)


def muon_arm(count: int, std: str) -> Arm:
    """Return one arm; arms with the same number of tokens share a search and differ only in initial values."""
    name, tuned_as = (f"{count} × std {one}" for one in (std, STDS[-1]))
    return Arm(name, tuned_as=tuned_as if name != tuned_as else None, tokens=tokens(count, float(std)))


def adamw_arm(count: int) -> Arm:
    """Return an arm trained with AdamW; several tokens are compared with one token trained with AdamW."""
    one, name = (f"{tokens} × std {ADAMW}" for tokens in (1, count))
    return Arm(name, against=one if name != one else None, tokens=tokens(count, float(STDS[-1])), optimizer="adamw")


def measure(run: Run, trained: TrainedModel) -> dict[str, Any]:
    """Measure how similar the tokens are on training images: over training, by layer, in predictions and parameters."""
    over_training = [
        {
            "epoch": line["epoch"],
            "outputs": line["collapse"].get("within", {}).get("class"),
            "parameters": line["collapse"].get("parameters", {}).get("mean"),
        }
        for line in read_log(run.folder / "log.jsonl", "evaluation")
    ]
    assert isinstance(trained.model, ViT)
    learned = trained.model.tokens["cls"][0].detach()
    if len(learned) == 1:
        return {"over_training": over_training}
    images = all_inputs(trained.model, trained.labels, trained.data.monitored(256))
    roles = measure_roles(trained.model, images, batch_size=64)
    centered = roles.cosines.centred
    assert roles.heads is not None
    assert centered is not None
    return {
        "over_training": over_training,
        "outputs_by_layer": roles.cosines.within["class"].tolist(),
        "centred_by_layer": [mean_over_pairs(layer) for layer in centered],
        "disagree": mean_over_pairs(roles.heads.argmax),
        "apart": (learned - learned.mean(0)).norm().item() / learned.norm().item(),
    }


def mean_over_pairs(matrix: Tensor) -> float:
    """Return the mean of a symmetric matrix without its diagonal."""
    count = len(matrix)
    return ((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1))).item()


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot accuracy by arm, and the cosine between the tokens over training."""
    arms = by_arm(rows)
    accuracy = {name: [100 * row["accuracy"][study.output] for row in own] for name, own in arms.items()}
    colors = {name: STYLES[name]["color"] for name in arms}
    by_optimizer = {
        title: {name: values for name, values in accuracy.items() if name.endswith(ADAMW) == adamw}
        for title, adamw in (("Muon", False), ("AdamW", True))
    }
    shown = {title: own for title, own in by_optimizer.items() if own}
    with figure(folder / "accuracy.png", columns=len(shown), width=4.5 * len(shown), height=2.8) as panels:
        for axes, (title, own) in zip(panels, shown.items(), strict=True):
            dots(axes, own, "validation accuracy, %", colors=colors, title=title)
    several = {name: own for name, own in arms.items() if not name.startswith("1 ")}
    with figure(folder / "cosines.png", columns=2, width=9.0) as panels:
        for axes, key, title in zip(panels, ("parameters", "outputs"), ("parameters", "last layer"), strict=True):
            curves = {
                name: [[(one["epoch"], one[key]) for one in row["over_training"]] for row in own]
                for name, own in several.items()
            }
            lines(axes, curves, "epoch", "cosine between class tokens", styles=STYLES, band=False)
            axes.set(title=title, ylim=(min(-0.05, axes.get_ylim()[0]), 1.05))
        legend(panels[0])


def last(row: Mapping[str, Any], name: str) -> float | None:
    """Return the last value of a list that only rows with several tokens have."""
    return row[name][-1] if name in row else None


STUDY = Study(
    name="class_tokens",
    question="Do class tokens that share a loss become copies of each other, and is it worth having several?",
    data=imagenette,
    base={
        "model": "vit_tiny_patch16", "preset": "small", "image_size": 128, "patch_size": 16, "epochs": 30,
        "optimizer": "muon", "mixing": 0.5,
    },
    arms=(
        *(muon_arm(count, std) for count in COUNTS for std in (STDS if count > 1 else STDS[-1:])),
        *(adamw_arm(count) for count in COUNTS),
    ),
    reference="1 × std .02",
    search={"lr": [1e-3, 3e-3]},
    monitor=256,
    monitor_every=5,
    measure=measure,
    columns=(
        Column("cosine of parameters", lambda row: row["over_training"][-1]["parameters"], "{:.4f}"),
        Column("cosine in the last layer", lambda row: last(row, "outputs_by_layer"), "{:.4f}"),
        Column("the same, centered", lambda row: last(row, "centred_by_layer"), "{:.4f}"),
        Column("tokens disagree, %", lambda row: 100 * row["disagree"] if "disagree" in row else None, "{:.2f}"),
        Column("share of the norm that differs", lambda row: row.get("apart"), "{:.1e}"),
        Column("peak memory, MiB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.0f}"),
    ),
    plot=plot,
    reduced={
        "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8,
        "epochs": 2, "batch_size": 16,
    },
)  # fmt: skip
