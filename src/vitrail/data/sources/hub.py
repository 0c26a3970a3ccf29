"""Data sets of other libraries: Hugging Face's datasets, and torchvision's. Each is imported when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.data.decode import decode_image, read_image
from vitrail.data.sample import clean
from vitrail.data.sources.labelled import DatasetPictures, Decode, Labelled, numbered
from vitrail.data.sources.parquet import NUMBERS_BUT_NOT_LABELS
from vitrail.errors import ImageError, InvalidOption


class HubPictures:
    """A data set of Hugging Face's library; any column of classes, whole numbers or words may be the classes."""

    def __init__(self, dataset: Any, called: str = "data set") -> None:
        kinds = {name: type(kind).__name__ for name, kind in dataset.features.items()}
        image = next((name for name, kind in kinds.items() if kind == "Image"), None)
        if image is None:
            raise ImageError(f"{called}: no column holds pictures (the columns: {', '.join(kinds)}).")
        # Pictures are decoded here as all others are: turned upright, with their colour profile.
        stored = type(dataset.features[image])(decode=False)
        self._pictures = dataset.select_columns([image]).cast_column(image, stored)
        self._dataset = dataset
        self._image = image
        self._kinds = kinds
        self.names: Sequence[str] = [f"{called}, row {row}" for row in range(len(dataset))]

    def labels(self, column: str | None) -> Labelled:
        possible = [name for name in self._kinds if self._is_class(name)]
        if column is None:
            column = "label" if "label" in possible else next(iter(self._likely(possible)), None)
            if column is None:
                return Labelled([None] * len(self.names), None)
        if column not in possible:
            raise InvalidOption(f"labels={column!r}: no such column of classes. Expected one of {', '.join(possible)}.")
        values = list(self._dataset[column])
        names = getattr(self._dataset.features[column], "names", None)
        if names:
            known = tuple(clean(str(name)) for name in names)
            return Labelled([value if value is not None and value >= 0 else None for value in values], known)
        return numbered(values)

    def fetch(self, row: int) -> Decode:
        stored = self._pictures[row][self._image] or {}
        if stored.get("bytes"):
            return partial(decode_image, stored["bytes"], self.names[row])
        if stored.get("path"):
            return partial(read_image, stored["path"])
        raise ImageError(f"{self.names[row]}: the row has no picture.")

    def _is_class(self, name: str) -> bool:
        kind = str(getattr(self._dataset.features[name], "dtype", ""))
        return self._kinds[name] == "ClassLabel" or kind.startswith(("int", "uint", "string", "large_string"))

    def _likely(self, names: Sequence[str]) -> list[str]:
        """List columns by how likely they say the class: those that are said to, then those of whole numbers."""
        classes = [name for name in names if self._kinds[name] == "ClassLabel"]
        numbers = [name for name in names if str(self._dataset.features[name].dtype).startswith(("int", "uint"))]
        odd = [name for name in numbers if name.lower() in NUMBERS_BUT_NOT_LABELS or name.lower().endswith("_id")]
        return classes or [name for name in numbers if name not in odd]


def open_hub(source: str) -> HubPictures:
    """Open ``OWNER/NAME[:SPLIT]`` of the Hugging Face hub, or of its cache."""
    name, _, split = source.partition(":")
    try:
        library = import_module("datasets")
    except ImportError as error:
        raise InvalidOption(
            f"hf:{source} needs the datasets library: pip install datasets. Parquet files that are here already need "
            "no more than pip install vitrail[data]."
        ) from error
    try:
        dataset = library.load_dataset(name, split=split or "train")
    except Exception as error:  # the network, the hub, a script, a name: whatever it likes
        raise ImageError(f"hf:{source}: the data set could not be opened ({error}).") from error
    return HubPictures(dataset, name)


def open_torchvision(source: str, columns: Sequence[str]) -> DatasetPictures:
    """Open ``NAME:ROOT[:SPLIT]`` of torchvision's data sets; nothing is downloaded."""
    name, _, rest = source.partition(":")
    root, _, split = rest.partition(":")
    try:
        library = import_module("torchvision.datasets")
    except ImportError as error:
        raise InvalidOption(f"torchvision:{source} needs torchvision: pip install vitrail[train].") from error
    kind = getattr(library, name, None) if name in library.__all__ else None
    if kind is None or not root:
        raise InvalidOption(
            f"torchvision:{source}: expected torchvision:NAME:ROOT[:SPLIT], with the name of one of torchvision's data "
            "sets, such as CIFAR10, and the folder that it was downloaded to."
        )
    known = inspect.signature(kind).parameters
    options: dict[str, Any] = {}
    if "train" in known:
        if split not in ("", "train", "test", "val"):
            raise InvalidOption(f"torchvision:{source}: {name} has the splits train and test; got {split!r}.")
        options = {"train": split in ("", "train")}
    elif split:
        place = next((option for option in ("split", "image_set") if option in known), None)
        if place is None:
            raise InvalidOption(f"torchvision:{source}: {name} has no splits; got {split!r}.")
        options = {place: split}
    try:
        dataset = kind(Path(root), **options)
    except (RuntimeError, OSError, ValueError) as error:
        raise ImageError(f"torchvision:{source}: {str(error).splitlines()[0]} Download it first.") from error
    return DatasetPictures(dataset, columns, name)
