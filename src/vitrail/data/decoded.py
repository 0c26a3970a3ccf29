"""What examples are read from: samples of one form each, be they pictures made square or arrays as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.augment.normalize import Normalising
from vitrail.data.sources.labelled import Decode, Labelled, Pictures
from vitrail.errors import ImageError

Read = Callable[[], Tensor]


class Form(NamedTuple):
    """What a sample is once it is read.

    Attributes:
        shape: channels, then height and width, or time, height and width.
        dtype: ``torch.uint8``, or a floating point one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """How many channels a sample has."""
        return self.shape[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Height and width, or time, height and width."""
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes that a sample takes."""
        return prod(self.shape) * self.dtype.itemsize


class Samples(Protocol):
    """Samples by row, with their classes: all that feeds, models and augmentation ask of data.

    ``fetch`` gives what reads a sample. It is called by one thread, quickest in rising order; what it gives may be
    called in any thread, and raises `ImageError` where the sample cannot be read.

    Attributes:
        names: what to call each sample.
        own: the form that samples have and keep; None for pictures, which are made as large as a model wants them.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def own(self) -> Form | None: ...

    def labelled(self, column: str | None) -> Labelled:
        """Give the classes by a column; by default by the one that says the class."""
        ...

    def fetch(self, row: int, side: int) -> Read:
        """Give what reads a sample; a picture so many pixels high and wide."""
        ...

    def normalising(self, rows: Sequence[int]) -> Normalising | None:
        """Say how samples are normalised for a model that learns from these rows; None: as the model expects it."""
        ...


class Squares:
    """Pictures, made square."""

    own = None

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self.names: Sequence[str] = pictures.names

    def labelled(self, column: str | None) -> Labelled:
        return self._pictures.labels(column)

    def fetch(self, row: int, side: int) -> Read:
        return partial(_decoded, self._pictures.fetch(row), side)

    def normalising(self, rows: Sequence[int]) -> None:
        return None


class Kept:
    """Samples that stay in host memory once they were read, by side; and why others cannot be read.

    Attributes:
        source: the samples themselves, of which nothing is kept.
    """

    def __init__(self, source: Samples) -> None:
        self.source = source
        self.names: Sequence[str] = source.names
        self.own = source.own
        self._found: dict[int, dict[int, Tensor | str]] = {}

    def labelled(self, column: str | None) -> Labelled:
        return self.source.labelled(column)

    def fetch(self, row: int, side: int) -> Read:
        found = self._found.setdefault(side, {})
        if row in found:
            return partial(_known, found[row])
        try:
            return partial(_remembered, found, row, self.source.fetch(row, side))
        except ImageError as error:
            found[row] = str(error)
            raise

    def normalising(self, rows: Sequence[int]) -> Normalising | None:
        return self.source.normalising(rows)


def square(picture: Image.Image, side: int) -> Tensor:
    """Make a picture (3, side, side) in uint8: the largest square in its middle, resized (bicubic, antialiased)."""
    width, height = picture.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    if edge != side or width != height:
        box = (left, top, left + edge, top + edge)
        picture = picture.resize((side, side), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _decoded(decode: Decode, side: int) -> Tensor:
    return square(decode(), side)


def _known(found: Tensor | str) -> Tensor:
    if isinstance(found, str):
        raise ImageError(found)
    return found


def _remembered(found: dict[int, Tensor | str], row: int, read: Read) -> Tensor:
    try:
        value = found[row] = read()
    except ImageError as error:
        found[row] = str(error)
        raise
    return value
