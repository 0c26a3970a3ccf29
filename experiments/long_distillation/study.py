"""Long runs: is a distilled ViT as good as the best convolutional net on a small data set?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.data import imagenette
from experiments.common.plots import INK, dots, figure
from experiments.common.study import Arm, Column, Rows, RunOf, Study
from experiments.common.tables import by_arm
from vitrail.training.config import read_yaml

PUBLISHED = 94.24
"""fastai's leaderboard: convolutional nets, 128 pixels, 200 epochs, from nothing."""

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMALL: dict[str, Any] = {
    "batch_size": 16, "epochs": 2, "warmup_epochs": 0, "image_size": 32, "dtype": "fp32", "preset": "tiny",
}  # fmt: skip
SMALLER = {**SMALL, "options": {"stem": "convolutions", "width": 32, "depth": 2, "heads": 2}}


def recipe(name: str, **others: Any) -> dict[str, Any]:
    """Give the fields of the recipe that the embedded model or its teacher was trained by, some of them replaced."""
    apart = ("validation", "save_every")  # the study's own matter
    return {field: value for field, value in read_yaml(RECIPES / name).items() if field not in apart} | others


CONV = recipe("imagenette-teacher.yaml")
VIT = recipe("imagenette-tiny.yaml", model="vit_small_patch16", epochs=120)
OF_TEACHERS = ("distillation", "distillation_weight", "temperature", "feature_weight")
ALONE = {field: value for field, value in VIT.items() if field not in OF_TEACHERS} | {"tokens": "cls,register=4"}


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw the accuracy of every arm beside the published one."""
    values = {name: [100 * row["accuracy"][study.answer] for row in own] for name, own in by_arm(rows).items()}
    with figure(folder / "accuracy.png", height=2.4) as (axes,):
        dots(axes, values, "accuracy on the validation set, %")
        axes.axvline(PUBLISHED, color=INK, linewidth=1, linestyle=":")
        axes.set_title(
            f"dotted: {PUBLISHED} %, published; conv is shown 144 pixels, the others 128", fontsize=8, color=INK
        )


STUDY = Study(
    name="long_distillation",
    question="Does a distilled ViT reach the published convolutional reference on Imagenette at 128 pixels?",
    data=imagenette,
    base={},
    arms=(
        Arm(
            "conv", size=144, reduced={**SMALL, "options": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}}, **CONV
        ),
        Arm("distilled", teacher=RunOf("conv", seed=0), reduced=SMALLER, **VIT),
        Arm(
            "distilled, plain end", against="distilled", teacher=RunOf("conv", seed=0), plain_epochs=12,
            reduced={**SMALLER, "plain_epochs": 1}, **VIT,
        ),
        Arm("labels alone", against="distilled", reduced=SMALLER, **ALONE),
    ),
    reference="conv",
    save_every=60,
    columns=(Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.1f}"),),
    draw=draw,
)  # fmt: skip
