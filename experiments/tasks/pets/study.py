"""Breed and species of pets: 37 and 2 classes; the first label determines the second."""

from __future__ import annotations

from functools import cache

from experiments.common.datasets import Data, pets
from experiments.common.shapes import Drawn, render_images
from experiments.tasks.two_tasks import two_task_study
from vitrail.data import Arrays, Dataset, open_dataset

TASKS = ("breed", "species")


@cache
def reduced_pets() -> Data:
    """Render a few shapes that stand for breeds of two species."""

    def opened(drawn: Drawn) -> Dataset:
        return open_dataset(
            Arrays(drawn.images, {"breed": drawn.shape, "species": drawn.shape % 2}), labels=TASKS, labeled=True
        )

    drawn = render_images(96, side=32, seed=0), render_images(48, side=32, seed=1)
    return Data(*map(opened, drawn), masks=drawn[1].float_masks)


STUDY = two_task_study(
    "tasks/pets",
    "Do tokens for breed and species attend to different patches, and are they better than one class token?",
    TASKS,
    pets,
    reduced_pets,
    base={"image_size": 128, "patch_size": 16, "epochs": 60},
    reduced={"image_size": 32, "patch_size": 8},
)
