"""What every source of samples provides, and how labels become class numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitrail._atomic_files import resolved
from vitrail.data.sample import Sample, TensorSpec
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption

LABEL = "label"
"""Name of the label column where none is chosen."""

MAX_CLASSES = 100_000
"""Larger numbers are not class numbers: they are timestamps, or identifiers."""

NOT_LABELS = ("id", "index", "width", "height", "__index_level_0__")
"""Columns of whole numbers that are never taken for labels unless they are chosen."""


class Labels(NamedTuple):
    """One label column: the class number of each sample, None without one, and the names of the classes, if known."""

    numbers: Sequence[int | None]
    names: tuple[str, ...] | None = None


class Source:
    """Samples by row, with names and labels. To add a data format, derive a class with ``names`` and ``read``.

    Attributes:
        names: name of each sample; their number is the length of the source.
        paths: file of each sample, if each has one of its own.
        has_masks, has_boxes: whether samples may have masks, or boxes.
        tensor_spec: shape and dtype of samples that are never resized (arrays); None for images.
        modality: what samples are: ``image``, ``video`` (`Clip`), ``audio`` (`Sound`), or ``array``.
    """

    names: Sequence[str]
    paths: Sequence[Path] | None = None
    has_masks: bool = False
    has_boxes: bool = False
    tensor_spec: TensorSpec | None = None
    modality: str = "image"

    def __len__(self) -> int:
        return len(self.names)

    def files(self, rows: Sequence[int]) -> Sequence[Path]:
        """Return the files on this machine that hold some samples."""
        return [path for row in rows if self.paths and isinstance(path := self.paths[row], Path)]

    def labels(self, column: str | None) -> Labels:
        """Return a label column, or raise ``InvalidOption``; None for the one that is most likely the class."""
        if column is not None:
            raise InvalidOption(f"labels={column!r}: {type(self).__name__} has no label columns")
        return Labels([None] * len(self))

    def values(self, column: str) -> Sequence[Any]:
        """Return a column's values as they are (numbers, text, lists), None for none; or raise ``InvalidOption``."""
        raise InvalidOption(f"labels={column!r}: {type(self).__name__} has no columns of values")

    def read(self, row: int) -> Sample:
        """Read one sample, or raise ``ImageError``."""
        return self.fetch(row)()

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        """Read the bytes of a sample and return a function that decodes them; by default both are :meth:`read`.

        Called by one thread, fastest in rising order; the returned function may run in any thread. Both raise
        ``ImageError``. Masks and boxes are decoded only with ``annotations``.
        """
        return partial(self.read, row)

    def statistics(self, rows: Sequence[int]) -> InputSpec | None:
        """Return the input specification of a model trained on these rows; None: the model has its own."""
        return None


def clean(name: str) -> str:
    """Return a name as printable text, whatever bytes it came from."""
    text = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def matching(pattern: str) -> list[Path]:
    """Return the paths that a glob pattern matches, sorted."""
    anchor = Path(Path(pattern).anchor)
    return sorted(anchor.glob(str(Path(pattern).relative_to(anchor))))


def distinct(paths: Iterable[Path]) -> list[Path]:
    """Return paths in their order, a file that is reached twice once."""
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(resolved(path), path)
    return list(found.values())


def number_classes(values: Sequence[Any]) -> Labels:
    """Number classes that are text in alphabetical order; numbers stay as they are, negative ones become None."""
    if not any(isinstance(value, str) for value in values):
        return Labels([value if value is not None and 0 <= value < 2**63 else None for value in values])
    names = sorted({str(value) for value in values if value is not None})
    places = {name: number for number, name in enumerate(names)}
    return Labels([None if value is None else places[str(value)] for value in values], tuple(map(clean, names)))


def class_number(value: Any, name: str) -> int | None:
    """Return a class number as an int; None for no class or a negative number."""
    if isinstance(value, Tensor | np.generic) and value.ndim == 0:
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name}: its class is {value!r:.80}; expected a whole number")
    return value if value >= 0 else None


def likely_label(columns: Sequence[str]) -> str | None:
    """Return the first of some columns of whole numbers that may be a label: no identifier, width or height."""
    return next((name for name in columns if name.lower() not in NOT_LABELS and not name.lower().endswith("_id")), None)
