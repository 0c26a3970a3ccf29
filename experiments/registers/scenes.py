"""Pictures to look at trained models with: objects whose mask and box are known, which no model was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from PIL import Image

from experiments.common.data import Data, box_around, data_file, few, imagenette
from experiments.common.shapes import SHAPES, Drawn, render
from vitrail.data import Dataset, Source, open_dataset
from vitrail.data.sample import Sample
from vitrail.data.sources import Labels

MOST = 400
"""Pets that are looked at, spread evenly over their training set."""


@dataclass(frozen=True)
class WithScenes(Data):
    """Data to train on, and other pictures to look at, with masks, boxes and classes."""

    scenes: Callable[[], Dataset] = field(kw_only=True)


class DrawnScenes(Source):
    """Drawn shapes as the source of a collection: the class is the shape, the mask is what it covers."""

    has_masks = has_boxes = True

    def __init__(self, drawn: Drawn) -> None:
        self._images, self._masks = drawn.images.numpy(), drawn.covered().numpy() > 0.5
        self.names = [f"shape {number}" for number in range(len(self._images))]
        self._classes: list[int | None] = drawn.shape.tolist()

    def labels(self, column: str | None) -> Labels:
        return Labels(self._classes, SHAPES)

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        return partial(self._read, row)

    def _read(self, row: int) -> Sample:
        """Return an image; its box is the smallest that holds the shape."""
        box = box_around(self._masks[row])
        assert box is not None, "a shape covers something"
        x0, y0, x1, y1 = map(float, box)
        image, mask = Image.fromarray(self._images[row].transpose(1, 2, 0)), self._masks[row].astype(np.uint8)
        return Sample(image, self.names[row], None, mask, ((x0, y0, x1, y1),))


@cache
def imagenette_and_pets() -> WithScenes:
    """Imagenette to train on, cats and dogs to look at."""
    data = imagenette()

    def pets() -> Dataset:
        return open_dataset(data_file("pets-160-train.parquet"), labels="species", limit=MOST)

    return WithScenes(data.train, data.validation, scenes=pets)


@cache
def few_and_shapes() -> WithScenes:
    """Some drawn pictures to train on, and others to look at, for the reduced setting."""
    data = few()
    return WithScenes(
        data.train, data.validation, scenes=lambda: open_dataset(DrawnScenes(render(60, side=32, seed=2)))
    )
