"""Shape and group of drawn figures: 6 and 2 classes, of which the first decides the second."""

from __future__ import annotations

from functools import partial

from experiments.common.data import grouped_shapes
from experiments.tasks.asking import asked
from experiments.tasks.shapes.study import BASE, REDUCED, draw

STUDY = asked(
    "tasks/groups",
    "Do tokens for shape and group of shapes look at different patches, and are they better than one class token?",
    ("shape", "group"),
    grouped_shapes,
    partial(grouped_shapes, 32, 96),
    base=BASE,
    reduced=REDUCED,
    draw=draw,
)
