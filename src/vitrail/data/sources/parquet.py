"""Pictures in parquet files, in the layout that Hugging Face ``datasets`` writes; needs pyarrow."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.decode import decode_image, decode_values
from vitrail.data.sample import UNKNOWN, Sample, clean, read_boxes
from vitrail.errors import ImageError, InvalidOption

IMAGES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
MASKS = ("trimap", "mask", "segmentation_mask", "segmentation", "annotation")
BOXES = ("box", "boxes")
OTHER_MEDIA = ("audio", "video", "wav", "mp3", "mp4")
NUMBERS_BUT_NOT_LABELS = ("id", "index", "width", "height", "__index_level_0__")
TRIMAP = {1: 1, 2: 0, 3: UNKNOWN}

PIECE_ROWS, PIECE_BYTES = 64, 64_000_000
"""How much of a row group is held in memory at once."""

MAX_NAMED_CLASSES = 100_000


@dataclass(frozen=True)
class Columns:
    """Which column holds what."""

    image: str
    mask: str | None
    box: str | None
    label: str | None
    label_name: str | None
    structs: frozenset[str]

    @property
    def wanted(self) -> list[str]:
        """What is read of each row: bytes, and not the paths beside them."""
        media = [name for name in (self.image, self.mask) if name is not None]
        paths = [f"{name}.bytes" if name in self.structs else name for name in media]
        return paths if self.box is None else [*paths, self.box]


class ParquetPictures:
    """The rows of parquet files, one file after the other.

    Names and labels are read at once; pictures are streamed, some rows of a row group at a time, which is quick while
    they are asked for in rising order. Paths that a file names are never followed: a picture's bytes are in the file,
    or it cannot be read.
    """

    def __init__(self, paths: Sequence[Path], labels: str | None = None) -> None:
        self._paths = paths
        files = [_open(path) for path in paths]
        self._columns = _find_columns(paths[0], files[0].schema_arrow, labels)
        for path, file in zip(paths, files, strict=True):
            if _find_columns(path, file.schema_arrow, labels) != self._columns:
                raise ImageError(
                    f"{path}: its columns are not those of {paths[0]}. Expected files of the same layout. Look at them "
                    "one after the other."
                )
        self._ends = list(accumulate(file.metadata.num_rows for file in files))
        self.has_masks = self._columns.mask is not None
        self.has_boxes = self._columns.box is not None
        self.names = [name for path, file in zip(paths, files, strict=True) for name in self._read_names(path, file)]
        if not self.names:
            raise ImageError(f"{paths[0]}: the file has no rows. Expected one for each picture.")
        self.labels, self.label_names = self._read_labels(files, self._columns)
        self._rows: _Rows | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to another process without the open file; it is opened there again."""
        return {**vars(self), "_rows": None}

    def classes(self, column: str) -> tuple[list[int | None], tuple[str, ...] | None]:
        """Give the class of each row in another column, and what the classes are called."""
        files = [_open(path) for path in self._paths]
        found = [_find_columns(path, file.schema_arrow, column) for path, file in zip(self._paths, files, strict=True)]
        return self._read_labels(files, found[0])

    def read_bytes(self, row: int) -> tuple[bytes, str]:
        """Give the bytes of one picture as they are stored, and what errors call it."""
        values, called = self._values(row)
        return self._picture(values, called), called

    def read(self, row: int) -> Sample:
        values, called = self._values(row)
        picture = decode_image(self._picture(values, called), called)
        mask = self._mask(values, picture.size, called)
        boxes = None if self._columns.box is None else read_boxes(values[self._columns.box], picture.size, called)
        return Sample(picture, self.names[row], self.labels[row], mask, boxes)

    def _values(self, row: int) -> tuple[dict[str, Any], str]:
        number = bisect_right(self._ends, row)
        path, place = self._paths[number], row - (self._ends[number - 1] if number else 0)
        called = f"{path.name}, row {place}"
        if self.names[row] != called:
            called = f"{called} ({self.names[row]})"
        if self._rows is None or self._rows.path != path:
            self._rows = _Rows(path, self._columns.wanted)
        return self._rows.read(place, called), called

    def _picture(self, values: dict[str, Any], called: str) -> bytes:
        data = _bytes(values, self._columns.image)
        if data is None:
            raise ImageError(
                f"{called}: the row has no picture. Expected its bytes in column {self._columns.image!r}; a path alone "
                "is not followed."
            )
        return data

    def _mask(self, values: dict[str, Any], size: tuple[int, int], called: str) -> np.ndarray | None:
        column = self._columns.mask
        data = None if column is None else _bytes(values, column)
        if data is None:
            return None
        found = decode_values(data, f"{called}, {column}")
        if found.shape != (size[1], size[0]):
            raise ImageError(
                f"{called}: its {column} has {found.shape[1]} × {found.shape[0]} pixels, and the picture has "
                f"{size[0]} × {size[1]}. Expected as many."
            )
        if column != "trimap":
            return (found > 0).astype(np.uint8)
        mask = np.full(found.shape, UNKNOWN, dtype=np.uint8)
        for value, meaning in TRIMAP.items():
            mask[found == value] = meaning
        return mask

    def _read_names(self, path: Path, file: Any) -> list[str]:
        """Name pictures by the paths beside their bytes, and by their rows where there is none."""
        rows = [f"{path.name}, row {number}" for number in range(file.metadata.num_rows)]
        column = self._columns.image
        if column not in self._columns.structs or "path" not in _fields(file.schema_arrow.field(column).type):
            return rows
        table = _guarded(path, lambda: file.read(columns=[f"{column}.path"]))
        found = (value["path"] if value else None for value in _texts(table.column(column)))
        return [clean(Path(name).name) if name else row for name, row in zip(found, rows, strict=True)]

    def _read_labels(self, files: Sequence[Any], columns: Columns) -> tuple[list[int | None], tuple[str, ...] | None]:
        column, beside = columns.label, columns.label_name
        if column is None:
            return [None] * len(self.names), None
        wanted = [column] if beside is None else [column, beside]
        values: list[Any] = []
        texts: list[Any] = []
        for path, file in zip(self._paths, files, strict=True):
            table = _guarded(path, lambda file=file: file.read(columns=wanted))
            values += _texts(table.column(column))
            texts += [] if beside is None else _texts(table.column(beside))
        if any(isinstance(value, str) for value in values):
            names = tuple(sorted({value for value in values if value is not None}))
            numbers = {name: number for number, name in enumerate(names)}
            return [numbers.get(value) for value in values], tuple(clean(name) for name in names)
        labels = [value if value is not None and 0 <= value < 2**63 else None for value in values]
        known = _hugging_face(files[0].schema_arrow).get(column, {}).get("names")
        if isinstance(known, list):
            return labels, tuple(clean(str(name)) for name in known)
        named = {label: text for label, text in zip(labels, texts, strict=False) if label is not None and text}
        if not named or max(named) >= MAX_NAMED_CLASSES:
            return labels, None
        return labels, tuple(clean(named.get(label, str(label))) for label in range(max(named) + 1))


class _Rows:
    """The rows of one file; a row group is streamed in pieces, and begun again only for an earlier row."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        self._file = _open(path)
        self._columns = columns
        groups = [self._file.metadata.row_group(number) for number in range(self._file.metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        sizes = [group.total_byte_size // max(group.num_rows, 1) for group in groups]
        self._lengths = [min(max(PIECE_BYTES // max(size, 1), 1), PIECE_ROWS) for size in sizes]
        self._group = -1
        self._start = 0
        self._piece: Any = ()
        self._pieces: Iterator[Any] = iter(())

    def read(self, row: int, called: str) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        try:
            if group != self._group or row < self._start:
                self._start, self._piece, self._group = self._ends[group - 1] if group else 0, (), group
                self._pieces = self._file.iter_batches(
                    batch_size=self._lengths[group], row_groups=[group], columns=self._columns
                )
            while row >= self._start + len(self._piece):
                self._start += len(self._piece)
                self._piece = ()
                self._piece = next(self._pieces)
            place = row - self._start
            return {name: self._piece.column(name)[place].as_py() for name in self._piece.schema.names}
        except (OSError, ValueError, StopIteration, _arrow().ArrowException) as error:
            self._group = -1
            raise ImageError(
                f"{called}: this part of the file is damaged ({_reason(error)}). Expected a complete parquet file. "
                "Fetch or write it again."
            ) from error


def _bytes(values: dict[str, Any], column: str) -> bytes | None:
    value = values[column]
    return value["bytes"] if isinstance(value, dict) else value


def _find_columns(path: Path, schema: Any, labels: str | None) -> Columns:
    """Say which column holds what, by their types and names."""
    types = _arrow().types
    kinds = {field.name: field.type for field in schema}
    structs = frozenset(name for name, kind in kinds.items() if types.is_struct(kind) and "bytes" in _fields(kind))
    binary = {name for name, kind in kinds.items() if types.is_binary(kind) or types.is_large_binary(kind)}
    media = [name for name in kinds if name in structs | binary]
    image = next((name for name in IMAGES if name in media), None)
    image = image or next((name for name in media if name not in (*MASKS, *OTHER_MEDIA)), None)
    if image is None:
        raise ImageError(
            f"{path}: no column holds pictures (the columns: {_listed(kinds)}). Expected one like 'image', with the "
            "bytes of a picture file in each row, as Hugging Face datasets write it."
        )
    mask = next((name for name in MASKS if name in media and name != image), None)
    box = next((name for name in BOXES if name in kinds and "list" in str(kinds[name])), None)
    whole = [name for name, kind in kinds.items() if types.is_integer(kind)]
    words = [name for name, kind in kinds.items() if _is_text(kind)]
    if labels is not None and labels not in (*whole, *words):
        raise InvalidOption(
            f"labels={labels!r}: {path} has no such column of classes. Expected one of {_listed([*whole, *words])}."
        )
    likely = [name for name in whole if name.lower() not in NUMBERS_BUT_NOT_LABELS and not name.lower().endswith("_id")]
    label = labels or ("label" if "label" in (*whole, *words) else next(iter(likely), None))
    beside = f"{label}_name" if f"{label}_name" in words and label in whole else None
    return Columns(image, mask, box, label, beside, structs)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ImageError(f"{path}: there is no such file. Expected a parquet file. Check the path.")
    _arrow()
    reader: Any = import_module("pyarrow.parquet")
    return _guarded(path, lambda: reader.ParquetFile(path, memory_map=True))


def _guarded(path: Path, read: Any) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, _arrow().ArrowException) as error:
        raise ImageError(
            f"{path}: this is not a parquet file, or it is damaged ({_reason(error)}). Expected a complete one. Fetch "
            "or write it again."
        ) from error


def _arrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ImageError("Reading parquet files needs pyarrow: pip install vitrail[data].") from error


def _texts(column: Any) -> list[Any]:
    """Give a column's values; none of a column whose text is not valid."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [None] * len(column)


def _hugging_face(schema: Any) -> dict[str, Any]:
    """Give what Hugging Face wrote down about the columns."""
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: entry for name, entry in found.items() if isinstance(entry, dict)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_text(kind: Any) -> bool:
    types = _arrow().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _fields(kind: Any) -> list[str]:
    return [kind.field(number).name for number in range(kind.num_fields)]


def _listed(names: Any) -> str:
    return ", ".join(repr(clean(name)) for name in names) or "none"


def _reason(error: BaseException) -> str:
    return clean(" ".join(str(error).split()))[:200] or type(error).__name__
