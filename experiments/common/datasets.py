"""Datasets of the studies, opened once per process.

Files are read from the folder given by ``--data`` or ``VITRAIL_DATA``, by default ``../shared/data`` next to the
checkout.
"""

from __future__ import annotations

import os
import tarfile
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

from experiments.common.shapes import COLORS, GROUPS, MOTIONS, SHAPES, Drawn, render_clips, render_images
from experiments.common.spectrograms import read_digits
from vitrail.data import Arrays, Dataset, open_dataset
from vitrail.data.decode import center_square
from vitrail.errors import ImageError

VARIABLE = "VITRAIL_DATA"
DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data"

IMAGENETTE = (
    "tench", "English springer", "cassette player", "chain saw", "church", "French horn", "garbage truck", "gas pump",
    "golf ball", "parachute",
)  # fmt: skip
"""Classes of Imagenette, in the order of their numbers."""


@dataclass(frozen=True)
class Data:
    """Training set and validation set; the validation set is used once per reported model.

    Attributes:
        masks: returns the object masks of the validation images, (N, S, S) in [0, 1]; None if unknown.
    """

    train: Dataset
    validation: Dataset
    masks: Callable[[], Tensor] | None = field(default=None, kw_only=True)

    def monitored(self, count: int) -> Dataset:
        """Return a fixed subset of the training set, for measurements during and after a run."""
        return self.train.take(min(count / len(self.train), 1.0), seed=0)


class ImageDataset(TorchDataset[tuple[Tensor, int]]):
    """Images (N, 3, S, S) in uint8 with one class each."""

    def __init__(self, images: Tensor, targets: Tensor, classes: Sequence[str]) -> None:
        self.images, self.classes = images, classes
        self.targets: list[int] = targets.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.targets[row]


def data_file(name: str) -> Path:
    """Return the path of a data file, or raise `ImageError` if it is missing."""
    path = Path(os.environ.get(VARIABLE) or DEFAULT) / name
    if not path.is_file():
        raise ImageError(f"{path} does not exist. Set the folder of the datasets with --data or {VARIABLE}")
    return path


def find_file(name: str) -> Path:
    """Return the path of ``NAME.parquet``, or of ``NAME.tar``: shards, for machines without pyarrow."""
    shards = Path(os.environ.get(VARIABLE) or DEFAULT) / f"{name}.tar"
    return shards if shards.is_file() else data_file(f"{name}.parquet")


@cache
def imagenette() -> Data:
    """Open Imagenette, ten classes of ImageNet at 128 pixels: 9,469 training and 3,925 validation images."""
    files = [find_file(f"imagenette-128-{part}") for part in ("train", "val")]
    classes = {"label": IMAGENETTE}
    return Data(*(open_dataset(file, labeled=True, classes=classes).cached() for file in files))


@cache
def pets() -> Data:
    """Open Oxford-IIIT Pet, 37 breeds of 2 species at 160 pixels: 3,680 training and 3,669 validation images."""
    files = [find_file(f"pets-160-{part}") for part in ("train", "test")]
    train, test = (open_dataset(file, labels=("breed", "species"), labeled=True).cached() for file in files)
    return Data(train, test, masks=lambda: trimaps(files[1], 160))


def trimaps_of(part: str, side: int) -> Tensor:
    """Read the masks of the ``train`` or ``test`` part of Pets."""
    return trimaps(find_file(f"pets-160-{part}"), side)


@cache
def trimaps(path: Path, side: int) -> Tensor:
    """Read pet masks (N, side, side), uncertain border included, with the same center crop as the images."""
    files = _trimap_files(path)
    masks = torch.empty(len(files), side, side)
    for row, data in enumerate(files):
        values = np.asarray(Image.open(BytesIO(data)))
        pet = Image.fromarray(np.isin(values, (1, 3)).astype(np.uint8) * 255).convert("RGB")
        masks[row] = center_square(pet, side)[0] / 255
    return masks


def _trimap_files(path: Path) -> list[bytes]:
    """Return the PNG files of all trimaps: a column of parquet, or ``NAME.trimap.png`` in shards."""
    if path.suffix == ".tar":
        with tarfile.open(path, "r:") as tar:
            members = [member for member in tar if member.name.endswith(".trimap.png")]
            return [file.read() for member in members if (file := tar.extractfile(member)) is not None]
    from pyarrow import parquet  # type: ignore[import-untyped]

    return [one["bytes"] for one in parquet.read_table(path, columns=["trimap"])["trimap"].to_pylist()]


def bounding_box(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int] | None:
    """Return x0, y0, x1, y1 of the smallest box around a mask (H, W); None if the mask is empty."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1] if len(rows) else None


@cache
def digits() -> Data:
    """Open spoken digits of six speakers as spectrograms (1, 40, 64): 2,700 training and 300 validation samples."""
    files = [find_file(f"spoken-digits-{part}") for part in ("train", "test")]
    return Data(*(open_dataset(read_digits(file), labels=("digit", "speaker"), labeled=True) for file in files))


@cache
def colored_shapes(side: int = 64, count: int = 4800) -> Data:
    """Render images with independent labels ``colour`` and ``shape``; half as many for validation."""
    return _rendered(side, count, {"colour": COLORS, "shape": SHAPES})


@cache
def grouped_shapes(side: int = 64, count: int = 4800) -> Data:
    """Render the same images with labels ``shape`` and ``group``; the first determines the second."""
    return _rendered(side, count, {"shape": SHAPES, "group": tuple(GROUPS)})


def _rendered(side: int, count: int, classes: Mapping[str, Sequence[str]]) -> Data:
    """Render images, labeled by the attributes of `Drawn` that ``classes`` names."""

    def opened(drawn: Drawn) -> Dataset:
        attributes = {name: "color" if name == "colour" else name for name in classes}  # rows spell the label "colour"
        labels = {name: getattr(drawn, attribute) for name, attribute in attributes.items()}
        return open_dataset(Arrays(drawn.images, labels, classes), labels=tuple(classes), labeled=True)

    drawn = render_images(count, side=side, seed=0), render_images(count // 2, side=side, seed=1)
    return Data(*map(opened, drawn), masks=drawn[1].float_masks)


@cache
def moving_shapes(frames: int = 8, side: int = 48, count: int = 4200) -> Data:
    """Render clips (3, T, S, S) whose class is a shape and its motion; half as many for validation."""
    classes = tuple(f"{shape}, {motion}" for shape in SHAPES for motion in MOTIONS)

    def opened(drawn: Drawn) -> Dataset:
        assert drawn.motion is not None
        return open_dataset(Arrays(drawn.images, drawn.shape * len(MOTIONS) + drawn.motion, classes), labeled=True)

    size = {"frames": frames, "side": side}
    return Data(opened(render_clips(count, seed=0, **size)), opened(render_clips(count // 2, seed=1, **size)))


@cache
def reduced_images() -> Data:
    """Render a few images of shapes, for the reduced setting of any study of images."""
    drawn = [render_images(count, side=32, seed=seed) for seed, count in enumerate((96, 48))]
    return Data(*(open_dataset(ImageDataset(one.images, one.shape, SHAPES), labeled=True).cached() for one in drawn))
