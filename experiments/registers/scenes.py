"""Images for measurements on trained models: objects with known mask and box that no model was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from PIL import Image

from experiments.common.datasets import Data, bounding_box, data_file, imagenette, reduced_images
from experiments.common.shapes import SHAPES, Drawn, render_images
from vitrail.data import Dataset, Source, open_dataset
from vitrail.data.sample import Sample
from vitrail.data.sources import Labels

MAX_PETS = 400
"""Number of pets, spread evenly over their training set."""


@dataclass(frozen=True)
class DataWithScenes(Data):
    """Training data, and other images with masks, boxes and classes for measurements."""

    scenes: Callable[[], Dataset] = field(kw_only=True)


class RenderedScenes(Source):
    """Source of rendered shapes: the class is the shape, the mask its area."""

    has_masks = has_boxes = True

    def __init__(self, drawn: Drawn) -> None:
        self._images, self._masks = drawn.images.numpy(), drawn.float_masks().numpy() > 0.5
        self.names = [f"shape {number}" for number in range(len(self._images))]
        self._classes: list[int | None] = drawn.shape.tolist()

    def labels(self, column: str | None) -> Labels:
        return Labels(self._classes, SHAPES)

    def read(self, row: int) -> Sample:
        """Return an image with its mask and the bounding box of the shape."""
        box = bounding_box(self._masks[row])
        assert box is not None, "a shape is never empty"
        x0, y0, x1, y1 = map(float, box)
        image, mask = Image.fromarray(self._images[row].transpose(1, 2, 0)), self._masks[row].astype(np.uint8)
        return Sample(image, self.names[row], None, mask, ((x0, y0, x1, y1),))


@cache
def imagenette_and_pets() -> DataWithScenes:
    """Open Imagenette for training, and cats and dogs for measurements."""
    data = imagenette()

    def pets() -> Dataset:
        return open_dataset(data_file("pets-160-train.parquet"), labels="species", limit=MAX_PETS)

    return DataWithScenes(data.train, data.validation, scenes=pets)


@cache
def reduced_images_and_shapes() -> DataWithScenes:
    """Render a few images for training and others for measurements, for the reduced setting."""
    data = reduced_images()

    def shapes() -> Dataset:
        return open_dataset(RenderedScenes(render_images(60, side=32, seed=2)))

    return DataWithScenes(data.train, data.validation, scenes=shapes)
