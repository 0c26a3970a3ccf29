"""Many pictures at once: files, folders, class folders, parquet files; read one by one, when they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import find_images
from vitrail.data.sample import UNKNOWN, Box, Sample, Source
from vitrail.data.sample_images import samples
from vitrail.data.sources.folder import PictureFiles, find_tables
from vitrail.data.sources.parquet import ParquetPictures
from vitrail.data.spec import Batch, Preprocessing, to_tensor
from vitrail.errors import ImageError, InvalidOption

UNLABELLED = -1
"""The label in a batch of a picture that has none, where others have one."""

PathLike = str | os.PathLike[str]


class Collection:
    """Pictures that are read when they are wanted; those that cannot be read are skipped, counted and named.

    A picture is known by its index in the collection as it was opened. It keeps it in a part of the collection, so
    that what several processes found can be put together. A collection is for one thread.

    Attributes:
        indices: the pictures that are in this part.
        names: what to call each picture, by index; also in a part those of the whole.
        labels: the class of each, by index, likewise.
        label_names: what to call the classes, if that is known.
    """

    def __init__(self, source: Source, rows: Sequence[int] | None = None, size: tuple[int, ...] | None = None) -> None:
        self._source = source
        self._size = size
        self._rows = range(len(source.names)) if rows is None else rows
        self._is_part = False
        self._skipped: dict[int, str] = {}
        self.indices: Sequence[int] = range(len(self._rows))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._source.names[row] for row in self._rows)

    @property
    def labels(self) -> tuple[int | None, ...]:
        return tuple(self._source.labels[row] for row in self._rows)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return self._source.label_names

    @cached_property
    def has_labels(self) -> bool:
        """Whether any picture of the whole collection has a label."""
        return any(self._source.labels[row] is not None for row in self._rows)

    @property
    def has_masks(self) -> bool:
        """Whether the collection has masks; single pictures may lack one."""
        return self._source.has_masks

    @property
    def has_boxes(self) -> bool:
        """Whether the collection has boxes; single pictures may lack them."""
        return self._source.has_boxes

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the pictures that could not be read so far, and why, in order."""
        return [(self._source.names[self._rows[index]], reason) for index, reason in sorted(self._skipped.items())]

    def read(self, index: int) -> Sample:
        """Read one picture.

        Raises:
            ImageError: it cannot be read, or its mask or box cannot.
        """
        return self._source.read(self._rows[index])

    def part(self, rank: int, world: int) -> Collection:
        """Give every ``world``-th picture, from number ``rank`` on: one process's part of the work."""
        if not 0 <= rank < world:
            raise InvalidOption(f"rank={rank}, world={world}: expected a rank from 0 to one less than world.")
        made = Collection(self._source, self._rows, self._size)
        made.indices = self.indices[rank::world]
        made._is_part = self._is_part or world > 1
        return made

    def some(self, indices: Iterable[int]) -> Collection:
        """Give the pictures with these indices alone, in order; they keep them."""
        made = Collection(self._source, self._rows, self._size)
        wanted = set(indices)
        made.indices = [index for index in self.indices if index in wanted]
        made._is_part = self._is_part
        return made

    def batches(
        self,
        preprocessing: Preprocessing,
        batch_size: int,
        *,
        on_skip: Callable[[str, str], object] | None = None,
        limit: int | None = None,
    ) -> Iterator[Batch]:
        """Read the pictures of this part and make them ready for a model, batch by batch.

        Args:
            preprocessing: what the model expects.
            batch_size: pictures in a batch; the last one may have fewer.
            on_skip: told the name of each picture that cannot be read, and why.
            limit: stop after so many pictures of this part, readable or not.

        Raises:
            ImageError: none could be read. A part among several is merely empty then: others may have some, and
                wait for it.
        """
        if batch_size < 1:
            raise InvalidOption(f"batch_size={batch_size}: expected 1 or more pictures in a batch.")
        indices = self.indices[: _checked(limit)]
        if self._size is not None:
            preprocessing = replace(preprocessing, size=self._size)
        ready: list[_Ready] = []
        none_read = True
        for index in indices:
            try:
                ready.append(_prepare(index, self.read(index), preprocessing))
            except ImageError as error:
                self._skipped[index] = str(error)
                if on_skip is not None:
                    on_skip(self._source.names[self._rows[index]], str(error))
                continue
            none_read = False
            if len(ready) == batch_size:
                yield self._batch(ready, preprocessing)
                ready = []
        if ready:
            yield self._batch(ready, preprocessing)
        if none_read and not self._is_part:
            raise _none_readable(len(indices), next(iter(self._skipped.values()), ""))

    def _batch(self, ready: Sequence[_Ready], preprocessing: Preprocessing) -> Batch:
        blank = torch.full(preprocessing.size, UNKNOWN, dtype=torch.uint8)
        labels = [UNLABELLED if one.label is None else one.label for one in ready]
        return Batch(
            images=torch.cat([one.image for one in ready]),
            indices=tuple(one.place for one in ready),
            names=tuple(one.name for one in ready),
            labels=torch.tensor(labels) if self.has_labels else None,
            masks=torch.stack([blank if one.mask is None else one.mask for one in ready]) if self.has_masks else None,
            boxes=[one.boxes for one in ready] if self.has_boxes else None,
        )


class _Ready(NamedTuple):
    """One picture at the model's size: the original may be large, and is forgotten at once."""

    place: int
    name: str
    label: int | None
    image: Tensor
    mask: Tensor | None
    boxes: tuple[Box, ...]


def _prepare(index: int, sample: Sample, preprocessing: Preprocessing) -> _Ready:
    height, width = preprocessing.size
    mask = None
    if sample.mask is not None:
        resized = Image.fromarray(sample.mask).resize((width, height), Image.Resampling.NEAREST)
        mask = torch.from_numpy(np.array(resized))
    across, down = width / sample.picture.width, height / sample.picture.height
    boxes = tuple((x0 * across, y0 * down, x1 * across, y1 * down) for x0, y0, x1, y1 in sample.boxes or ())
    image = to_tensor([sample.picture], preprocessing)
    return _Ready(index, sample.name, sample.label, image, mask, boxes)


def open_collection(
    source: PathLike | Iterable[PathLike] | None = None,
    *,
    limit: int | None = None,
    labels: str | None = None,
    size: tuple[int, ...] | None = None,
) -> Collection:
    """Open pictures, without reading them yet.

    Args:
        source: a picture file, or several; a folder of pictures; a folder of class folders (each with pictures and
            nothing below, named as the class is); parquet files as Hugging Face writes them, or a folder of these.
            The sample pictures by default.
        limit: take at most so many, spread evenly.
        labels: the column of a parquet file that holds the classes; by default ``label``, or else the first column
            of whole numbers.
        size: height and width of prepared pictures, instead of what the model expects.

    Raises:
        ImageError: there is no such file, or no picture.
        InvalidOption: there is no such column.

    Example:
        >>> open_collection().names
        ('astronaut.jpg', 'chelsea.jpg', 'coffee.jpg')
    """
    if source is None:
        given = list(samples().values())
    else:
        given = [Path(source)] if isinstance(source, str | os.PathLike) else [Path(path) for path in source]
    tables = find_tables(given)
    opened: Source
    if tables:
        opened = ParquetPictures(tables, labels)
    elif labels is not None:
        raise InvalidOption(
            f"labels={labels!r} names a column of a parquet file, and there is none here. Leave it out; the classes of "
            "picture files are the names of the folders that they are in."
        )
    else:
        root = given[0] if len(given) == 1 and given[0].is_dir() else None
        opened = PictureFiles(find_images(given), root)
    return Collection(opened, spread(range(len(opened.names)), limit), size)


def spread(items: Sequence[int], limit: int | None) -> Sequence[int]:
    """Choose at most so many, evenly, in order."""
    _checked(limit)
    if limit is None or limit >= len(items):
        return items
    return [items[number * len(items) // limit] for number in range(limit)]


def _checked(limit: int | None) -> int | None:
    if limit is not None and limit < 1:
        raise InvalidOption(f"limit={limit}: expected 1 or more pictures. Leave it out to take all.")
    return limit


def _none_readable(count: int, example: str = "") -> ImageError:
    """Say that there is nothing to look at, with the reason of one picture."""
    why = f" The first: {example}" if example else ""
    return ImageError(f"None of the {count} pictures could be read, so there is nothing to look at.{why}")
