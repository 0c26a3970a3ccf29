"""Colour and shape of drawn figures: 8 and 6 classes, every pair equally often."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.data import coloured_shapes
from experiments.common.plots import figure
from experiments.common.study import Rows, Study
from experiments.tasks.asking import asked
from experiments.tasks.looking import SHOWN
from experiments.tasks.showing import by_answering

TASKS = ("colour", "shape")
BASE: dict[str, Any] = {
    "patch_size": 8, "epochs": 30, "batch_size": 128, "augment": "light", "mixup": 0.0, "cutmix": 0.0,
}  # fmt: skip
REDUCED = {"patch_size": 8}
GAP = ((1, 1), (1, 1), (0, 0))

Picture = np.ndarray[Any, Any]


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw the first pictures, lit where the class token and each task's token of the first seed look."""
    validation = study.data().validation
    pictures = [np.asarray(validation.tensor(index, 0).permute(1, 2, 0)) / 255 for index in range(SHOWN)]
    columns = {"picture": pictures}
    for name, (first, *_) in by_answering(study, rows, "shown_maps").items():
        columns[name] = [lighted(picture, np.array(weights)) for picture, weights in zip(pictures, first, strict=True)]
    with figure(folder / "looks.png", columns=len(columns), width=6.4, height=8.8) as sides:
        for axes, (name, shown) in zip(sides, columns.items(), strict=True):
            axes.imshow(np.concatenate([np.pad(one, GAP, constant_values=1) for one in shown]))
            axes.set_title(name)
            axes.axis("off")


def lighted(picture: Picture, weights: Picture) -> Picture:
    """Darken a picture (S, S, 3), the more the less a patch gets of (h, w) weights; as it is where it gets most."""
    high, wide = (side // patches for side, patches in zip(picture.shape, weights.shape, strict=False))
    light = np.kron(weights / weights.max(), np.ones((high, wide)))
    return picture * (0.15 + 0.85 * light[..., None])


STUDY = asked(
    "tasks/shapes",
    "Do tokens for colour and shape look at different patches, and are they better than one class token?",
    TASKS,
    coloured_shapes,
    partial(coloured_shapes, 32, 96),
    base=BASE,
    reduced=REDUCED,
    draw=draw,
)
