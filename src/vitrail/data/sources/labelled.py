"""Where labelled pictures come from: files, parquet files, or a data set of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.decode import as_rgb, decode_image, read_image
from vitrail.data.sample import clean
from vitrail.data.sources.folder import PictureFiles
from vitrail.data.sources.parquet import ParquetPictures
from vitrail.errors import ImageError, InvalidOption

LABEL = "label"
"""What the classes are called where no column was asked for."""

MAX_CLASSES = 100_000
"""Larger numbers are taken for something else than classes: times, or names that are numbers."""

Decode = Callable[[], Image.Image]


class Labelled(NamedTuple):
    """The class of each picture by one column, None where it has none, and what the classes are called."""

    numbers: Sequence[int | None]
    names: tuple[str, ...] | None


class Pictures(Protocol):
    """Pictures by row, with their classes.

    ``fetch`` gives what decodes a picture. It is called by one thread, quickest in rising order; what it gives may be
    called in any thread.
    """

    @property
    def names(self) -> Sequence[str]: ...
    def labels(self, column: str | None) -> Labelled: ...
    def fetch(self, row: int) -> Decode: ...


class FilePictures:
    """Picture files in class folders."""

    def __init__(self, files: PictureFiles) -> None:
        self._files = files
        self.names: Sequence[str] = files.names

    def labels(self, column: str | None) -> Labelled:
        if column not in (None, "label"):
            raise InvalidOption(
                f"labels={column!r} names a column, and these are picture files, whose classes are the names of their "
                "folders. Leave it out; parquet files, shards and data sets may have several columns."
            )
        return Labelled(self._files.labels, self._files.label_names)

    def fetch(self, row: int) -> Decode:
        return partial(read_image, self._files.paths[row])


class TablePictures:
    """Rows of parquet files; any column of whole numbers or words may be the classes."""

    def __init__(self, table: ParquetPictures) -> None:
        self._table = table
        self.names: Sequence[str] = table.names

    def labels(self, column: str | None) -> Labelled:
        if column is None:
            return Labelled(self._table.labels, self._table.label_names)
        return Labelled(*self._table.classes(column))

    def fetch(self, row: int) -> Decode:
        return partial(decode_image, *self._table.read_bytes(row))


class DatasetPictures:
    """A torch data set of pairs of a picture and its class, or its classes.

    Attributes:
        names: what to call the pictures: their numbers.
    """

    def __init__(self, dataset: Any, columns: Sequence[str] = (), called: str = "") -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InvalidOption(
                f"{type(dataset).__name__}: expected a data set with a length, of which each example can be asked for "
                "by its number; a stream has no order that a run could go on from."
            )
        self._dataset = dataset
        self._columns = tuple(columns)
        self._called = called or type(dataset).__name__
        self.names: Sequence[str] = [f"{self._called}, number {row}" for row in range(len(dataset))]

    def labels(self, column: str | None) -> Labelled:
        place = 0
        if column is not None and self._columns and column in self._columns:
            place = self._columns.index(column)
        elif len(self._columns) > 1 or (column is not None and self._columns):
            raise InvalidOption(f"labels={column!r}: expected one of {', '.join(self._columns)}.")
        numbers = [whole(one[place] if len(one) > place else None, self.names[row]) for row, one in self._all()]
        names = getattr(self._dataset, "classes", None)
        listed = isinstance(names, Sequence) and not isinstance(names, str) and len(self._columns) < 2
        return Labelled(numbers, tuple(clean(_word(name)) for name in names) if listed and names else None)

    def fetch(self, row: int) -> Decode:
        return partial(as_picture, self._example(row)[0], self.names[row])

    def _example(self, row: int) -> Sequence[Any]:
        try:
            found = self._dataset[row]
        except Exception as error:  # the user's own code, or a decoder's
            raise ImageError(f"{self.names[row]}: it could not be read ({type(error).__name__}: {error}).") from error
        return found if isinstance(found, tuple | list) else (found,)

    def _all(self) -> Sequence[tuple[int, Sequence[Any]]]:
        """Give the classes of every example; without reading pictures, where the data set lists them as well."""
        count = len(self.names)
        for attribute in ("targets", "labels", "_labels"):
            found = getattr(self._dataset, attribute, None)
            if isinstance(found, Tensor | np.ndarray):
                found = found.tolist()
            plain = getattr(self._dataset, "target_transform", None) is None
            if plain and isinstance(found, Sequence) and len(found) == count:
                return [(row, _several(one)) for row, one in enumerate(found)]
        return [(row, _several(self._example(row)[1:])) for row in range(count)]


def as_picture(value: Any, name: str) -> Image.Image:
    """Make a picture of whatever a data set calls one.

    Tensors are (C, H, W) with one or three colours, either bytes or numbers from 0 to 1; arrays are (H, W, C) or
    (H, W), of bytes.
    """
    if isinstance(value, Image.Image):
        return as_rgb(value)
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        good = value.dim() == 3 and value.shape[0] in (1, 3)
        if good and value.is_floating_point():
            good = bool(((value >= 0) & (value <= 1)).all())
            value = (value * 255).round()
        value = value.byte().permute(1, 2, 0).numpy() if good else None
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        value = value[..., 0] if value.ndim == 3 and value.shape[-1] == 1 else value
        if value.ndim == 2 or (value.ndim == 3 and value.shape[-1] == 3):
            return Image.fromarray(np.ascontiguousarray(value)).convert("RGB")
    raise ImageError(
        f"{name}: this is not a picture. Expected a PIL picture, or a tensor (3, H, W) of bytes or of numbers from 0 "
        "to 1. Leave out transforms such as normalising: they are made in training."
    )


def numbered(values: Sequence[Any]) -> Labelled:
    """Number classes that are words, in order of the alphabet; numbers stay what they are."""
    if not any(isinstance(value, str) for value in values):
        return Labelled([value if value is not None and value >= 0 else None for value in values], None)
    words = sorted({str(value) for value in values if value is not None})
    places = {word: number for number, word in enumerate(words)}
    numbers = [None if value is None else places[str(value)] for value in values]
    return Labelled(numbers, tuple(clean(word) for word in words))


def _several(value: Any) -> Sequence[Any]:
    """Take classes apart: one, or several in a list or a tensor, or (one list,)."""
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return value if isinstance(value, tuple | list) else (value,)


def whole(value: Any, name: str) -> int | None:
    """Read the number of a class; None where there is none."""
    if isinstance(value, Tensor | np.generic) and value.ndim == 0:
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name}: its class is {value!r:.80}. Expected a whole number.")
    return value if value >= 0 else None


def _word(name: Any) -> str:
    """Give one name of a class; where there are several, the first."""
    return str(name[0]) if isinstance(name, tuple | list) and name else str(name)
