"""The data of the experiments, opened once for all runs of a process.

It lies in the folder that ``--data`` or ``VITRAIL_DATA`` names, by default ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from experiments.common.shapes import COLOURS, GROUPS, MOTIONS, SHAPES, Drawn, film, render
from experiments.common.sounds import read_digits
from vitrail.data import Arrays, Dataset, open_dataset
from vitrail.data.decode import center_square
from vitrail.errors import ImageError

VARIABLE = "VITRAIL_DATA"
DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data"


@dataclass(frozen=True)
class Data:
    """What is learned from, and the validation set, which is looked at once per reported model.

    Attributes:
        masks: gives where the object is in each validation picture, (N, S, S) from 0 to 1; None where nobody knows.
    """

    train: Dataset
    validation: Dataset
    masks: Callable[[], Tensor] | None = field(default=None, kw_only=True)

    def watched(self, count: int) -> Dataset:
        """Take so many training examples, the same each time, to look at while a run goes on and after it."""
        return self.train.take(min(count / len(self.train), 1.0), seed=0)


class Pictures(TorchDataset[tuple[Tensor, int]]):
    """Pictures (N, 3, S, S) in uint8 with one class each, as a torch data set."""

    def __init__(self, images: Tensor, targets: Tensor, classes: Sequence[str]) -> None:
        self.images, self.classes = images, classes
        self.targets: list[int] = targets.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.targets[row]


def data_file(name: str) -> Path:
    """Find a file of the data, or say where it was looked for."""
    path = Path(os.environ.get(VARIABLE) or DEFAULT) / name
    if not path.is_file():
        raise ImageError(f"{path} is missing. Name the folder of the data sets with --data or {VARIABLE}")
    return path


@cache
def imagenette() -> Data:
    """Ten classes of ImageNet at 128 pixels: 9,469 pictures to learn from and 3,925 to validate on."""
    return Data(
        *(open_dataset(data_file(f"imagenette-128-{part}.parquet"), labeled=True).cached() for part in ("train", "val"))
    )


@cache
def pets() -> Data:
    """Cats and dogs, 37 breeds of 2 species, at 160 pixels: 3,680 to learn from and 3,669 to validate on."""
    files = [data_file(f"pets-160-{part}.parquet") for part in ("train", "test")]
    train, test = (open_dataset(file, labels=("breed", "species"), labeled=True).cached() for file in files)
    return Data(train, test, masks=lambda: trimaps(files[1], 160))


@cache
def trimaps(path: Path, side: int) -> Tensor:
    """Read where the pet is (N, side, side), its uncertain border included, in the square that pictures are cut to."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    found = torch.empty(parquet.read_metadata(path).num_rows, side, side)
    for row, one in enumerate(parquet.read_table(path, columns=["trimap"])["trimap"].to_pylist()):
        values = np.asarray(Image.open(BytesIO(one["bytes"])))
        pet = Image.fromarray(np.isin(values, (1, 3)).astype(np.uint8) * 255).convert("RGB")
        found[row] = center_square(pet, side)[0] / 255
    return found


def box_around(covered: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int] | None:
    """Give x0, y0, x1, y1 of the smallest box that holds all that is covered (H, W); None where nothing is."""
    rows, columns = (np.flatnonzero(covered.any(axis)) for axis in (1, 0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1] if len(rows) else None


@cache
def digits() -> Data:
    """Ten digits spoken by six people, as spectrograms (1, 40, 64): 2,700 to learn from and 300 to validate on."""
    files = [data_file(f"spoken-digits-{part}.parquet") for part in ("train", "test")]
    return Data(*(open_dataset(read_digits(file), labels=("digit", "speaker"), labeled=True) for file in files))


@cache
def coloured_shapes(side: int = 64, count: int = 4800) -> Data:
    """Drawn pictures with independent labels ``colour`` and ``shape``, and half as many to validate on."""
    return drawn_shapes(side, count, {"colour": COLOURS, "shape": SHAPES})


@cache
def grouped_shapes(side: int = 64, count: int = 4800) -> Data:
    """The same pictures with the labels ``shape`` and ``group``, of which the first decides the second."""
    return drawn_shapes(side, count, {"shape": SHAPES, "group": tuple(GROUPS)})


def drawn_shapes(side: int, count: int, classes: Mapping[str, Sequence[str]]) -> Data:
    """Draw pictures, and label them by what they are called here and by `Drawn`."""

    def opened(found: Drawn) -> Dataset:
        labels = {name: getattr(found, name) for name in classes}
        return open_dataset(Arrays(found.images, labels, classes), labels=tuple(classes), labeled=True)

    drawn = render(count, side=side, seed=0), render(count // 2, side=side, seed=1)
    return Data(*map(opened, drawn), masks=drawn[1].covered)


@cache
def moving_shapes(frames: int = 8, side: int = 48, count: int = 4200) -> Data:
    """Drawn clips (3, T, S, S) whose class is a shape and how it moves, and half as many to validate on."""
    classes = tuple(f"{shape}, {motion}" for shape in SHAPES for motion in MOTIONS)

    def opened(found: Drawn) -> Dataset:
        assert found.motion is not None
        return open_dataset(Arrays(found.images, found.shape * len(MOTIONS) + found.motion, classes), labeled=True)

    shape = {"frames": frames, "side": side}
    return Data(opened(film(count, seed=0, **shape)), opened(film(count // 2, seed=1, **shape)))


@cache
def few() -> Data:
    """Some drawn pictures, for the reduced setting of any study of pictures: which shape is it?"""
    drawn = [render(count, side=32, seed=seed) for seed, count in enumerate((96, 48))]
    return Data(*(open_dataset(Pictures(one.images, one.shape, SHAPES), labeled=True).cached() for one in drawn))
