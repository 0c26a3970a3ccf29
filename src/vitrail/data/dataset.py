"""Examples to learn from: pictures or arrays with one or more classes each, whatever they are stored in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.data.augment.normalize import Normalising
from vitrail.data.decode import find_images
from vitrail.data.decoded import Form, Kept, Read, Samples, Squares
from vitrail.data.loading.order import generator
from vitrail.data.sources.arrays import Arrays
from vitrail.data.sources.folder import PictureFiles, find_tables
from vitrail.data.sources.hub import HubPictures, open_hub, open_torchvision
from vitrail.data.sources.labelled import LABEL as LABEL
from vitrail.data.sources.labelled import MAX_CLASSES, DatasetPictures, FilePictures, Labelled, Pictures, TablePictures
from vitrail.data.sources.parquet import ParquetPictures
from vitrail.data.sources.shards import ShardPictures, find_shards
from vitrail.errors import ImageError, InvalidOption

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class Examples:
    """Samples with their classes: pictures, which are read one by one when they are wanted, or arrays.

    They are data for training and evaluating, as paths are. Whoever does so several times with the same pictures opens
    them with ``open_examples(path).kept()``, and they are decoded once.

    Attributes:
        classes: names of the classes, by label column.
        labels: (N, T) in int64: the class of each example by each column, columns in the order of ``classes``.
        unlabelled: how many samples of the source were left out because they have no class.
    """

    def __init__(
        self,
        samples: Samples,
        labels: Tensor,
        classes: Mapping[str, Sequence[str]],
        rows: Sequence[int],
        unlabelled: int = 0,
    ) -> None:
        self._samples = samples
        self._rows = rows
        self.labels = labels
        self.classes: dict[str, tuple[str, ...]] = {column: tuple(names) for column, names in classes.items()}
        self.unlabelled = unlabelled

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        columns = [f"{name}: {len(names)} classes" for name, names in self.classes.items()]
        return f"Examples({', '.join([str(len(self)), *columns])})"

    @property
    def names(self) -> Sequence[str]:
        """What to call each example."""
        return [self._samples.names[row] for row in self._rows]

    @property
    def own(self) -> Form | None:
        """The form that samples have and keep; None for pictures, which are made as large as a model wants them."""
        return self._samples.own

    def name(self, index: int) -> str:
        """What to call one example."""
        return self._samples.names[self._rows[index]]

    def form(self, side: int) -> Form:
        """Say what is read: pictures so many pixels high and wide, or arrays as they are."""
        return self.own or Form((3, side, side), torch.uint8)

    def read(self, index: int, side: int) -> Tensor:
        """Read a sample: an array as it is; a picture as (3, side, side) in uint8, the largest square in its middle.

        Raises:
            ImageError: it cannot be read.
        """
        return self.fetch(index, side)()

    def fetch(self, index: int, side: int) -> Read:
        """Fetch a sample's bytes, and give what decodes them; the second may be done in another thread."""
        return self._samples.fetch(self._rows[index], side)

    def labelled(self, column: str | None) -> Labelled:
        """Give the classes by one of the columns; by default by the only one."""
        if column is None and len(self.classes) == 1:
            (column,) = self.classes
        if column not in self.classes:
            raise InvalidOption(
                f"labels={column!r}: these examples were opened with {', '.join(self.classes) or 'no labels'}. Open "
                "them with the columns that are wanted."
            )
        return Labelled(self.labels[:, list(self.classes).index(column)].tolist(), self.classes[column])

    def normalising(self) -> Normalising | None:
        """Say how these samples are normalised for a model that learns from them; None: as the model expects it."""
        return self._samples.normalising(self._rows)

    def kept(self) -> Examples:
        """Give the same examples, of which decoded pictures stay in host memory, for as long as anybody has them.

        What was decoded for one run, as bytes and at one size, is there for the next, and for the parts that `split`
        and `take` give. That is so for feeds that keep pictures on the device; workers read files each time.
        """
        if self.own is not None or isinstance(self._samples, Kept):
            return self
        return Examples(Kept(self._samples), self.labels, self.classes, self._rows, self.unlabelled)

    def bare(self) -> Examples:
        """Give the same samples without classes, and without what is kept: all that a process needs that only reads."""
        samples = self._samples.source if isinstance(self._samples, Kept) else self._samples
        return Examples(samples, self.labels.new_empty(len(self), 0), {}, self._rows)

    def split(self, share: float, seed: int) -> tuple[Examples, Examples]:
        """Hold out a share of the examples, as much of each class as of all: (the rest, those held out).

        Classes are those of the first column. The same seed holds out the same examples.
        """
        count = round(share * len(self))
        if not 0 < share < 1 or not 0 < count < len(self):
            raise InvalidOption(
                f"A share of {share} of {len(self)} examples cannot be held out. Expected a number above 0 and below 1 "
                "that leaves at least one example on either side."
            )
        held = self._spread(count, seed)
        kept = torch.ones(len(self), dtype=torch.bool)
        kept[held] = False
        return self._some(kept.nonzero()[:, 0]), self._some(held)

    def take(self, share: float, seed: int) -> Examples:
        """Take a share of the examples, as much of each class as of all; the same seed takes the same ones."""
        if not 0 < share <= 1:
            raise InvalidOption(f"A share of {share} of the examples: expected a number above 0, up to 1.")
        return self if share == 1 else self._some(self._spread(max(round(share * len(self)), 1), seed))

    def _spread(self, count: int, seed: int) -> Tensor:
        """Choose so many at equal distances from a list of all examples, sorted by class and mixed within a class."""
        total = len(self)
        order = torch.randperm(total, generator=generator("cpu", seed, total))
        if self.labels.shape[1]:
            order = order[self.labels[order, 0].argsort(stable=True)]
        places = (torch.arange(count) * 2 + 1) * total // (2 * count)
        return order[places].sort().values

    def _some(self, indices: Tensor) -> Examples:
        rows = [self._rows[index] for index in indices.tolist()]
        return Examples(self._samples, self.labels[indices], self.classes, rows, self.unlabelled)


def open_examples(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset[Any] | Arrays | Examples,
    *,
    labels: Sequence[str] | None = (),
    classes: Mapping[str, Sequence[str]] | None = None,
) -> Examples:
    """Open labelled pictures, without reading the pictures yet. Pictures without a class are left out, and counted.

    Args:
        source: where they are, one of

            - a folder of class folders;
            - parquet files as Hugging Face writes them, or a folder of these;
            - webdataset shards: ``*.tar`` files or a folder of these, or ``wds:PATH/name-{000..012}.tar``;
            - ``hf:OWNER/NAME[:SPLIT]``, by the datasets library;
            - ``torchvision:NAME:ROOT[:SPLIT]``, of its data sets, already downloaded;
            - a torch data set of pairs (picture, class) or (picture, classes);
            - `Arrays`; or examples that were opened already, whose own columns are all that there are.
        labels: label columns, one for each task; by default the one column that says the class, which is called
            ``label`` then. None for pictures without classes.
        classes: names of the classes as they are known already, from a checkpoint: numbers follow these.

    Raises:
        ImageError: there are no pictures, or none with a class.
        InvalidOption: a column does not exist, or its classes are not those that are known.
    """
    opened = source if isinstance(source, Examples) else None
    samples: Samples = opened._samples if opened else _open_samples(source, labels or ())
    among = opened._rows if opened else range(len(samples.names))
    if labels is None:
        return Examples(samples, torch.zeros(len(among), 0).long(), {}, among)
    known = dict(classes or {})
    if labels and known and set(labels) != set(known):
        raise InvalidOption(
            f"labels={','.join(labels)}: the classes that are known are of {','.join(known)}. Expected the same."
        )
    columns = tuple(known or labels or (opened.classes if opened else ())) or (LABEL,)
    if len(set(labels)) < len(labels):
        raise InvalidOption(f"labels={','.join(columns)}: a column is named twice. Expected each once.")
    only = columns == (LABEL,) if opened is None else len(columns) == len(opened.classes) == 1
    found: dict[str, tuple[str, ...]] = {}
    numbers = []
    for column in columns:
        labelled = (opened or samples).labelled(None if only and not labels else column)
        found[column], values = _classes(column, labelled, known.get(column))
        numbers.append(values)
    table = torch.stack(numbers, 1)
    rows = (table >= 0).all(1).nonzero()[:, 0]
    if not len(rows):
        raise ImageError(
            f"None of the {len(table)} pictures has a class ({', '.join(columns)}). Expected a folder that holds "
            "two or more folders, one for each class, and nothing else (name PATH/train if the classes are there), or "
            "a column of classes; a recipe that needs none takes labels='none'."
        )
    left_out = len(table) - len(rows) + (opened.unlabelled if opened else 0)
    return Examples(samples, table[rows], found, [among[row] for row in rows.tolist()], left_out)


def _classes(column: str, labelled: Labelled, known: Sequence[str] | None) -> tuple[tuple[str, ...], Tensor]:
    """Give names and numbers (N,) of a column's classes, -1 where a picture has none."""
    numbers = torch.tensor([-1 if value is None else value for value in labelled.numbers], dtype=torch.int64)
    top = int(numbers.max()) + 1 if len(numbers) else 0
    if top > MAX_CLASSES:
        raise InvalidOption(f"{column}: a class has the number {top - 1}. Expected numbers that count classes from 0.")
    names = tuple(labelled.names or ())
    if names and top > len(names):
        raise InvalidOption(
            f"{column}: a class has the number {top - 1}, and {len(names)} classes have names. Expected as many."
        )
    if known is None:
        return names or tuple(str(number) for number in range(top)), numbers
    known = tuple(known)
    if not names:
        if known != tuple(map(str, range(len(known)))):
            raise InvalidOption(
                f"{column}: the classes here are numbers without names, and those that are known have names "
                f"({_some_of(known)}); which is which cannot be told. Expected names: a folder for each class, or a "
                "column of names."
            )
        if top > len(known):
            raise InvalidOption(f"{column}: a class has the number {top - 1}; known are {len(known)} classes.")
        return known, numbers
    if names == known:
        return known, numbers
    return known, _renumbered(column, numbers, names, known)


def _renumbered(column: str, numbers: Tensor, names: tuple[str, ...], known: tuple[str, ...]) -> Tensor:
    """Give classes the numbers that their names are known by."""
    used = numbers[numbers >= 0].unique().tolist()
    places = {name: number for number, name in enumerate(known)}
    unknown = [names[number] for number in used if names[number] not in places]
    if unknown or len(places) < len(known):
        shown = _some_of(unknown) or "a name that occurs twice"
        raise InvalidOption(
            f"{column}: {shown} cannot be told among the {len(known)} classes that are known ({_some_of(known)}). "
            "Expected the same classes."
        )
    table = torch.tensor([places.get(name, -1) for name in names] + [-1])
    return table[numbers]  # the last entry is for -1


def _some_of(names: Sequence[str]) -> str:
    return ", ".join([repr(name) for name in names[:5]] + ["..."] * (len(names) > 5))


def _open_samples(source: Any, columns: Sequence[str]) -> Samples:
    return source if isinstance(source, Arrays) else Squares(_open_pictures(source, columns))


def _open_pictures(source: Any, columns: Sequence[str]) -> Pictures:
    """Find out what holds the pictures."""
    if isinstance(source, str):
        kind, _, rest = source.partition(":")
        if kind == "hf":
            return open_hub(rest)
        if kind == "torchvision":
            return open_torchvision(rest, columns)
        if kind == "wds" or source.endswith(".tar"):
            return ShardPictures(find_shards(rest if kind == "wds" else source))
    if hasattr(source, "features") and hasattr(source, "cast_column"):
        return HubPictures(source)
    given = _paths(source)
    if not given:
        return DatasetPictures(source, columns)
    tables = find_tables(given)
    if tables:
        return TablePictures(ParquetPictures(tables))
    if all(path.suffix == ".tar" or (path.is_dir() and any(path.glob("*.tar"))) for path in given):
        return ShardPictures([shard for path in given for shard in find_shards(str(path))])
    root = given[0] if len(given) == 1 and given[0].is_dir() else None
    return FilePictures(PictureFiles(find_images(given), root))


def _paths(source: Any) -> list[Path]:
    if isinstance(source, str | os.PathLike):
        return [Path(source)]
    several = isinstance(source, list | tuple) and all(isinstance(one, str | os.PathLike) for one in source)
    return [Path(one) for one in source] if several else []
