"""Datasets of Hugging Face's ``datasets`` library, which is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vitrail.data.decode import decode_image, read_image
from vitrail.data.sample import Sample
from vitrail.data.sources.base import LABEL, Labels, Source, clean, likely_label, number_classes
from vitrail.errors import ImageError, InvalidOption


class HubSource(Source):
    """A map-style ``datasets.Dataset``; any column of classes, whole numbers or text may be a label."""

    def __init__(self, dataset: Any, name: str = "dataset") -> None:
        kinds = {column: type(kind).__name__ for column, kind in dataset.features.items()}
        image = next((column for column, kind in kinds.items() if kind == "Image"), None)
        if image is None:
            raise ImageError(f"{name}: no column holds images (columns: {', '.join(kinds)})")
        # Images are decoded here, as all others are: orientation and color profile applied.
        stored = type(dataset.features[image])(decode=False)
        self._images = dataset.select_columns([image]).cast_column(image, stored)
        self._dataset, self._image, self._kinds = dataset, image, kinds
        self.names = [f"{name}, row {row}" for row in range(len(dataset))]

    def labels(self, column: str | None) -> Labels:
        kinds = ("int", "uint", "string", "large_string")
        possible = [
            name for name, kind in self._kinds.items() if kind == "ClassLabel" or self._dtype(name).startswith(kinds)
        ]
        if column is None:
            declared = [name for name in possible if self._kinds[name] == "ClassLabel"]
            whole = [name for name in possible if self._dtype(name).startswith(("int", "uint"))]
            column = LABEL if LABEL in possible else next(iter(declared), likely_label(whole))
        if column is None:
            return Labels([None] * len(self))
        if column not in possible:
            raise InvalidOption(f"labels={column!r}: no such label column; expected one of {', '.join(possible)}")
        found = number_classes(list(self._dataset[column]))
        names = getattr(self._dataset.features[column], "names", None)
        return Labels(found.numbers, tuple(clean(str(name)) for name in names)) if names else found

    def values(self, column: str) -> Sequence[Any]:
        if column not in self._kinds or self._kinds[column] == "Image":
            raise InvalidOption(
                f"labels={column!r}: no such column of labels; the columns are {', '.join(self._kinds)}"
            )
        return list(self._dataset[column])

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        stored, name = self._images[row][self._image] or {}, self.names[row]
        data, path = stored.get("bytes"), stored.get("path") or ""
        if not data and not path:
            raise ImageError(f"{name}: the row has no image")
        return lambda: Sample(decode_image(data, name) if data else read_image(path), name)

    def _dtype(self, name: str) -> str:
        return str(getattr(self._dataset.features[name], "dtype", ""))


def open_hub(source: str) -> HubSource:
    """Open ``OWNER/NAME[:SPLIT]`` from the Hugging Face Hub, or from its cache."""
    name, _, split = source.partition(":")
    try:
        library = import_module("datasets")
    except ImportError as error:
        raise InvalidOption(
            f"hf:{source} needs the datasets library; pip install datasets. Parquet files on this machine need only "
            "pip install vitrail[data]"
        ) from error
    try:
        dataset = library.load_dataset(name, split=split or "train")
    except Exception as error:  # network, Hub, script or name: datasets raises many kinds
        raise ImageError(f"hf:{source}: the dataset could not be opened ({error})") from error
    return HubSource(dataset, name)
