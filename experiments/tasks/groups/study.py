"""Shape and group of rendered figures: 6 and 2 classes; the first label determines the second."""

from __future__ import annotations

from functools import partial

from experiments.common.datasets import grouped_shapes
from experiments.tasks.shapes.study import BASE, REDUCED, plot
from experiments.tasks.two_tasks import two_task_study

STUDY = two_task_study(
    "tasks/groups",
    "Do tokens for shape and group of shapes attend to different patches, and are they better than one class token?",
    ("shape", "group"),
    grouped_shapes,
    partial(grouped_shapes, 32, 96),
    base=BASE,
    reduced=REDUCED,
    plot=plot,
)
