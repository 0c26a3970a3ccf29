"""Breed and species on pets: 37 and 2 classes, of which the first decides the second."""

from __future__ import annotations

from functools import cache

from experiments.common.data import Data, pets
from experiments.common.shapes import Drawn, render
from experiments.tasks.asking import asked
from vitrail.data import Arrays, Dataset, open_dataset

TASKS = ("breed", "species")


@cache
def few() -> Data:
    """Some drawn shapes as breeds, of two species."""

    def opened(drawn: Drawn) -> Dataset:
        return open_dataset(
            Arrays(drawn.images, {"breed": drawn.shape, "species": drawn.shape % 2}), labels=TASKS, labeled=True
        )

    drawn = render(96, side=32, seed=0), render(48, side=32, seed=1)
    return Data(*map(opened, drawn), masks=drawn[1].covered)


STUDY = asked(
    "tasks/pets",
    "Do tokens for breed and species look at different patches, and are they better than one class token?",
    TASKS,
    pets,
    few,
    base={"image_size": 128, "patch_size": 16, "epochs": 60},
    reduced={"image_size": 32, "patch_size": 8},
)
