"""Color and shape of rendered figures: 8 and 6 classes, every pair equally often."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.datasets import colored_shapes
from experiments.common.plots import figure
from experiments.common.study import Rows, Study
from experiments.tasks.measure import SHOWN
from experiments.tasks.report import by_task_token
from experiments.tasks.two_tasks import two_task_study

TASKS = ("colour", "shape")  # part of the run keys, so the spelling stays
BASE: dict[str, Any] = {
    "patch_size": 8, "epochs": 30, "batch_size": 128, "augment": "light", "mixup": 0.0, "cutmix": 0.0,
}  # fmt: skip
REDUCED = {"patch_size": 8}
GAP = ((1, 1), (1, 1), (0, 0))

Array = np.ndarray[Any, Any]


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Show the first images, lit where the class token and each task token of the first seed attend."""
    validation = study.data().validation
    images = [np.asarray(validation.tensor(index, 0).permute(1, 2, 0)) / 255 for index in range(SHOWN)]
    columns = {"image": images}
    for name, (first, *_) in by_task_token(study, rows, "shown_maps").items():
        columns[name] = [lit_by_attention(image, np.array(map_)) for image, map_ in zip(images, first, strict=True)]
    with figure(folder / "attention.png", columns=len(columns), width=6.4, height=8.8) as panels:
        for axes, (name, shown) in zip(panels, columns.items(), strict=True):
            axes.imshow(np.concatenate([np.pad(one, GAP, constant_values=1) for one in shown]))
            axes.set_title(name)
            axes.axis("off")


def lit_by_attention(image: Array, weights: Array) -> Array:
    """Scale the brightness of an image (S, S, 3) by patch weights (h, w); the maximum keeps it unchanged."""
    height, width = (side // patches for side, patches in zip(image.shape, weights.shape, strict=False))
    light = np.kron(weights / weights.max(), np.ones((height, width)))
    return image * (0.15 + 0.85 * light[..., None])


STUDY = two_task_study(
    "tasks/shapes",
    "Do tokens for color and shape attend to different patches, and are they better than one class token?",
    TASKS,
    colored_shapes,
    partial(colored_shapes, 32, 96),
    base=BASE,
    reduced=REDUCED,
    plot=plot,
)
