"""Long runs: is a distilled ViT as good as the best convolutional network on a small dataset?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.datasets import imagenette
from experiments.common.plots import INK, dots, figure
from experiments.common.results import by_arm
from experiments.common.study import Arm, Column, Rows, RunOf, Study
from vitrail.training.config import read_yaml

PUBLISHED = 94.24
"""fastai's leaderboard: a convolutional network, 128 pixels, 200 epochs, trained from scratch."""

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
REDUCED: dict[str, Any] = {
    "batch_size": 16, "epochs": 2, "warmup_epochs": 0, "image_size": 32, "dtype": "fp32", "preset": "tiny",
}  # fmt: skip
REDUCED_TEACHER = {**REDUCED, "options": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}}
REDUCED_STUDENT = {**REDUCED, "options": {"stem": "convolutions", "width": 32, "depth": 2, "heads": 2}}


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """Return the options of the recipe of the shipped model or its teacher, some of them replaced."""
    set_by_runner = ("validation", "save_every")
    return {field: value for field, value in read_yaml(RECIPES / name).items() if field not in set_by_runner} | changes


TEACHER = recipe("imagenette-teacher.yaml")
STUDENT = recipe("imagenette-tiny.yaml", model="vit_small_patch16", epochs=120)
DISTILLATION_OPTIONS = ("distillation", "distillation_weight", "temperature", "feature_weight")
LABELS_ONLY = {field: value for field, value in STUDENT.items() if field not in DISTILLATION_OPTIONS} | {
    "tokens": "cls,register=4"
}


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot the accuracy of every arm and the published one."""
    values = {name: [100 * row["accuracy"][study.output] for row in own] for name, own in by_arm(rows).items()}
    with figure(folder / "accuracy.png", height=2.4) as (axes,):
        dots(axes, values, "validation accuracy, %")
        axes.axvline(PUBLISHED, color=INK, linewidth=1, linestyle=":")
        axes.set_title(
            f"dotted: published ({PUBLISHED} %); conv is evaluated at 144 pixels, the others at 128",
            fontsize=8,
            color=INK,
        )


STUDY = Study(
    name="long_distillation",
    question="Does a distilled ViT reach the published convolutional reference on Imagenette at 128 pixels?",
    data=imagenette,
    base={},
    arms=(
        Arm("conv", size=144, reduced=REDUCED_TEACHER, **TEACHER),
        Arm("distilled", teacher=RunOf("conv", seed=0), reduced=REDUCED_STUDENT, **STUDENT),
        Arm(
            "distilled, plain end", against="distilled", teacher=RunOf("conv", seed=0), plain_epochs=12,
            reduced={**REDUCED_STUDENT, "plain_epochs": 1}, **STUDENT,
        ),
        Arm("labels alone", against="distilled", reduced=REDUCED_STUDENT, **LABELS_ONLY),
    ),
    reference="conv",
    save_every=60,
    columns=(Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.1f}"),),
    plot=plot,
)  # fmt: skip
