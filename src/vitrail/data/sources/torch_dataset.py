"""Map-style torch datasets of (image, label) pairs, lists of images, and torchvision's datasets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.data.decode import as_image
from vitrail.data.sample import Sample
from vitrail.data.sources.base import Labels, Source, class_number, clean
from vitrail.errors import ImageError, InvalidOption


class TorchSource(Source):
    """Anything with a length whose items are an image, (image, label) or (image, labels), which ``columns`` names."""

    def __init__(self, dataset: Any, columns: Sequence[str] = (), name: str = "") -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InvalidOption(
                f"{type(dataset).__name__}: expected a map-style dataset, with a length and items by number; a stream "
                "has no order that a run could resume from"
            )
        self._dataset, self._columns = dataset, tuple(columns)
        self.names = [f"{name or type(dataset).__name__}, number {row}" for row in range(len(dataset))]

    def labels(self, column: str | None) -> Labels:
        values = self._column(column)
        numbers = [class_number(value, name) for value, name in zip(values, self.names, strict=True)]
        names = getattr(self._dataset, "classes", None)
        listed = isinstance(names, Sequence) and not isinstance(names, str) and len(self._columns) < 2
        named: Sequence[Any] = names if listed and names else ()
        several = [name if isinstance(name, tuple | list) and name else (name,) for name in named]
        return Labels(numbers, tuple(clean(str(synonyms[0])) for synonyms in several) or None)

    def values(self, column: str) -> Sequence[Any]:
        found = self._column(column)
        return [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in found]

    def _column(self, column: str | None) -> list[Any]:
        """Return the labels of all items, of one column if there are several."""
        known = column in self._columns
        if not known and (len(self._columns) > 1 or (column is not None and self._columns)):
            raise InvalidOption(f"labels={column!r}: expected one of {', '.join(self._columns)}")
        place = self._columns.index(str(column)) if known else 0
        return [one[place] if len(one) > place else None for one in self._all_labels()]

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        value, name = self._item(row)[0], self.names[row]
        return lambda: Sample(as_image(value, name), name)

    def _item(self, row: int) -> Sequence[Any]:
        try:
            found = self._dataset[row]
        except Exception as error:  # the user's own code, or a decoder's
            raise ImageError(f"{self.names[row]}: could not be read ({type(error).__name__}: {error})") from error
        return found if isinstance(found, tuple | list) else (found,)

    def _all_labels(self) -> list[Sequence[Any]]:
        """Return the labels of every item; without reading images, where the dataset lists its targets."""
        for attribute in ("targets", "labels", "_labels"):
            found = getattr(self._dataset, attribute, None)
            if isinstance(found, Tensor | np.ndarray):
                found = found.tolist()
            plain = getattr(self._dataset, "target_transform", None) is None
            if plain and isinstance(found, Sequence) and len(found) == len(self):
                return [_as_sequence(one) for one in found]
        return [_as_sequence(self._item(row)[1:]) for row in range(len(self))]


def open_torchvision(source: str, columns: Sequence[str]) -> TorchSource:
    """Open ``NAME:ROOT[:SPLIT]``, one of torchvision's datasets; nothing is downloaded."""
    name, _, rest = source.partition(":")
    root, _, split = rest.partition(":")
    try:
        library = import_module("torchvision.datasets")
    except ImportError as error:
        raise InvalidOption(f"torchvision:{source} needs torchvision; pip install vitrail[train]") from error
    kind = getattr(library, name, None) if name in library.__all__ else None
    if kind is None or not root:
        raise InvalidOption(
            f"torchvision:{source}: expected torchvision:NAME:ROOT[:SPLIT], the name of one of torchvision's datasets, "
            "such as CIFAR10, and the folder that it was downloaded to"
        )
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {}
    if "train" in known:
        if split not in ("", "train", "test", "val"):
            raise InvalidOption(f"torchvision:{source}: {name} has the splits train and test; got {split!r}")
        options = {"train": split in ("", "train")}
    elif split:
        option = next((one for one in ("split", "image_set") if one in known), None)
        if option is None:
            raise InvalidOption(f"torchvision:{source}: {name} has no splits; got {split!r}")
        options = {option: split}
    try:
        dataset = kind(Path(root), **options)
    except (RuntimeError, OSError, ValueError) as error:
        raise ImageError(f"torchvision:{source}: {str(error).splitlines()[0]} Download it first") from error
    return TorchSource(dataset, columns, name)


def _as_sequence(value: Any) -> Sequence[Any]:
    """Return labels as a sequence: one, several in a list or a tensor, or (one list,)."""
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return value if isinstance(value, tuple | list) else (value,)
