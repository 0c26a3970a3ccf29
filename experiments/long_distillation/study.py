"""One long run: can a distilled ViT be as good as the best convolutional net on a small data set?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.data import imagenette
from experiments.common.plots import INK, dots, figure
from experiments.common.study import Arm, Column, Rows, RunOf, Study
from experiments.common.tables import by_arm

PUBLISHED = 94.24
"""fastai's leaderboard: convolutional nets, 128 pixels, 200 epochs, from nothing."""

SMALL: dict[str, Any] = {"epochs": 2, "image_size": 32}
VIT: dict[str, Any] = {
    "model": "vit_small_patch16",
    "patch_size": 8,
    "options": {"stem": "convolutions"},
    "reduced": {**SMALL, "options": {"stem": "convolutions", "width": 32, "depth": 2, "heads": 2}},
}


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw the accuracy of every arm beside the published one."""
    values = {name: [100 * row["accuracy"][study.answer] for row in own] for name, own in by_arm(rows).items()}
    with figure(folder / "accuracy.png", height=2.4) as (axes,):
        dots(axes, values, "accuracy on the validation set, %")
        axes.axvline(PUBLISHED, color=INK, linewidth=1, linestyle=":")
        axes.annotate("convolutional, published", (PUBLISHED, -0.42), fontsize=8, color=INK, ha="right")


STUDY = Study(
    name="long_distillation",
    question="Does a distilled ViT reach the published convolutional reference on Imagenette at 128 pixels?",
    data=imagenette,
    base={"preset": "small", "image_size": 128, "epochs": 200, "compile": "off"},
    arms=(
        Arm("plain", tokens="cls", **VIT),
        Arm(
            "conv",
            model="timm:ecaresnet50t",
            reduced={**SMALL, "options": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}},
        ),
        Arm("distilled", tokens="cls,distillation,register=4", teacher=RunOf("conv"), **VIT),
    ),
    reference="plain",
    save_every=10,
    timing=1.0,
    columns=(
        Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.1f}"),
        Column("pictures a second", lambda row: row["images_per_s"], "{:,.0f}"),
        Column("minutes of training", lambda row: row["seconds"] / 60, "{:.1f}"),
    ),
    draw=draw,
    reduced={"preset": "tiny", "batch_size": 16},
)
