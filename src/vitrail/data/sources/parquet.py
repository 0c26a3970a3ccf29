"""Parquet files in the layout that Hugging Face ``datasets`` writes; needs pyarrow."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from vitrail.data.decode import EXTENSIONS, decode_image
from vitrail.data.labels.masks import FOREGROUND, PixelReader
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.registry import MEDIA, recording, require
from vitrail.data.remote import RemoteFile
from vitrail.data.sample import Box, Sample
from vitrail.data.sources.base import LABEL, MAX_CLASSES, Labels, Source, clean, likely_label, number_classes
from vitrail.data.sources.table import names_files
from vitrail.errors import ImageError, InvalidOption

BOXES = ("box", "boxes")

PIECE_ROWS, PIECE_BYTES = 64, 64_000_000
"""Most rows and bytes of a row group that are held in memory."""


@dataclass(frozen=True)
class Columns:
    """Columns that hold images (or clips or sounds), masks and boxes; ``structs`` hold bytes beside a path."""

    modality: str
    image: str
    mask: str | None
    box: str | None
    structs: frozenset[str]

    @property
    def read(self) -> list[str]:
        """Columns to read for each row: bytes, without the paths beside them."""
        media = [name for name in (self.image, self.mask) if name is not None]
        paths = [f"{name}.bytes" if name in self.structs else name for name in media]
        return paths if self.box is None else [*paths, self.box]


class ParquetSource(Source):
    """The rows of parquet files, one file after the other.

    Names are read at once; images are streamed, some rows of a row group at a time, which is fast in rising order.
    Paths in a file are never followed: an image's bytes are in the file, or it cannot be read.
    """

    def __init__(self, paths: Sequence[Path], modality: str | None = None, masks: PixelReader = FOREGROUND) -> None:
        self._paths, self._masks = paths, masks
        files = [_open(path) for path in paths]
        self._columns = _find_columns(paths[0], files[0].schema_arrow, modality, masks.columns)
        self.modality = self._columns.modality
        require(self.modality)
        for path, file in zip(paths, files, strict=True):
            if _find_columns(path, file.schema_arrow, modality, masks.columns) != self._columns:
                raise ImageError(f"{path}: its columns are not those of {paths[0]}; open them one after the other")
        self._ends = list(accumulate(file.metadata.num_rows for file in files))
        self.has_masks = self._columns.mask is not None
        self.has_boxes = self._columns.box is not None
        self.names = [name for path, file in zip(paths, files, strict=True) for name in self._read_names(path, file)]
        if not self.names:
            raise ImageError(f"{paths[0]}: the file has no rows; expected one for each image")
        self._rows: _Rows | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open file; another process opens it again."""
        return {**vars(self), "_rows": None}

    def files(self, rows: Sequence[int]) -> Sequence[Path]:
        return [path for path in self._paths if isinstance(path, Path)]

    def labels(self, column: str | None) -> Labels:
        """Return a column of whole numbers or text; by default ``label``, or else the first likely one."""
        schema = _open(self._paths[0]).schema_arrow
        columns = {_label_column(path, _open(path).schema_arrow, column) for path in self._paths}
        if len(columns) > 1:
            raise ImageError(f"{self._paths[0]}: its label column is not in all files; name a column")
        (column,) = columns
        if column is None:
            return Labels([None] * len(self))
        found, beside = number_classes(self._read_column(column)), f"{column}_name"
        if found.names is not None:
            return found
        names = _declared_names(schema, column)
        if names is None and beside in schema.names and _is_text(schema.field(beside).type):
            names = _names_beside(found.numbers, self._read_column(beside))
        return found._replace(names=names)

    def values(self, column: str) -> Sequence[Any]:
        names = _open(self._paths[0]).schema_arrow.names
        if column not in names or column in self._columns.read:
            raise InvalidOption(
                f"labels={column!r}: {self._paths[0]} has no such column of labels; its columns are {_listed(names)}"
            )
        return self._read_column(column)

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        number = bisect_right(self._ends, row)
        path, place = self._paths[number], row - (self._ends[number - 1] if number else 0)
        name, where = self.names[row], f"{path.name}, row {place}"
        where = where if name == where else f"{where} ({name})"
        if self._rows is None or self._rows.path != path:
            self._rows = _Rows(path, self._columns.read)
        values = self._rows.read(place, where)
        if _bytes(values[self._columns.image]) is None:
            raise ImageError(
                f"{where}: the row has no {MODALITIES[self.modality].noun}; expected its bytes in column "
                f"{self._columns.image!r} (a path alone is not followed)"
            )
        return partial(_decode, values, self._columns, self._masks, name, where, annotations)

    def _read_names(self, path: Path, file: Any) -> list[str]:
        """Return the file names beside the images' bytes, and row numbers where there are none."""
        rows = [f"{path.name}, row {number}" for number in range(file.metadata.num_rows)]
        column = self._columns.image
        kind = file.schema_arrow.field(column).type
        if column not in self._columns.structs or kind.get_field_index("path") < 0:
            return rows
        table = _guarded(path, partial(file.read, columns=[f"{column}.path"]))
        found = (value["path"] if value else None for value in _values(table.column(column)))
        return [clean(Path(name).name) if name else row for name, row in zip(found, rows, strict=True)]

    def _read_column(self, column: str) -> list[Any]:
        found: list[Any] = []
        for path in self._paths:
            file = _open(path)
            found += _values(_guarded(path, partial(file.read, columns=[column])).column(column))
        return found


def label_table(path: Path) -> dict[str, list[Any]] | None:
    """Return the columns of a parquet file that names files instead of holding them; None for other files."""
    file = _open(path)
    schema, types = file.schema_arrow, _arrow().types
    texts = [field.name for field in schema if _is_text(field.type)]
    media = any(
        types.is_binary(field.type) or types.is_large_binary(field.type) or types.is_struct(field.type)
        for field in schema
    )
    if media or not names_files(texts):
        return None
    table = _guarded(path, file.read)
    found = {name: _values(table.column(name)) for name in schema.names}
    return {name: [None if value != value else value for value in values] for name, values in found.items()}


class _Rows:
    """Streams the rows of one file in pieces; a row group is started again only for an earlier row.

    pyarrow reads whole row groups, which may hold gigabytes of images.
    """

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

    def read(self, row: int, name: str) -> dict[str, Any]:
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
            return {column: self._piece.column(column)[place].as_py() for column in self._piece.schema.names}
        except (OSError, ValueError, StopIteration, _arrow().ArrowException) as error:
            self._group = -1
            raise ImageError(
                f"{name}: this part of the file is damaged ({_reason(error)}); fetch or write it again"
            ) from error


def is_parquet(path: Path) -> bool:
    """Return whether a file is a parquet file, by its name or else by its first bytes."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return True
    if path.suffix.lower() in EXTENSIONS or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def _decode(
    values: dict[str, Any], columns: Columns, masks: PixelReader, name: str, where: str, annotations: bool
) -> Sample:
    data = _bytes(values[columns.image]) or b""
    if columns.modality != "image":
        return Sample(recording(columns.modality, data, where), name)
    image = decode_image(data, where)
    if not annotations:
        return Sample(image, name)
    mask = boxes = None
    if columns.mask is not None and (found := _bytes(values[columns.mask])) is not None:
        mask = masks.of_column(columns.mask).read(found, columns.mask, image.size, where)
    if columns.box is not None:
        boxes = _read_boxes(values[columns.box], image.size, where)
    return Sample(image, name, None, mask, boxes)


def _read_boxes(value: Any, size: tuple[int, int], where: str) -> tuple[Box, ...] | None:
    """Return one box of four numbers, or a list of boxes, clipped to the image."""
    if value is None:
        return None
    flat = len(value) == 4 and not any(isinstance(one, list) for one in value)
    made: list[Box] = []
    for box in [value] if flat else value:
        good = isinstance(box, list) and len(box) == 4 and all(isinstance(one, int | float) for one in box)
        x0, y0, x1, y1 = (float(one) for one in box) if good else (math.nan,) * 4
        x0, y0, x1, y1 = max(x0, 0.0), max(y0, 0.0), min(x1, float(size[0])), min(y1, float(size[1]))
        if not (good and x0 < x1 and y0 < y1):
            raise ImageError(
                f"{where}: {str(box)[:80]} is not a box in an image of {size[0]} × {size[1]} pixels; expected x0, y0, "
                "x1, y1 from the upper left to the lower right corner"
            )
        made.append((x0, y0, x1, y1))
    return tuple(made)


def _bytes(value: Any) -> bytes | None:
    found: bytes | None = value["bytes"] if isinstance(value, dict) else value
    return found


def _find_columns(path: Path, schema: Any, modality: str | None, masks: Sequence[str]) -> Columns:
    """Find the columns of images (or other media), masks and boxes by their types and names."""
    types = _arrow().types
    kinds = {field.name: field.type for field in schema}
    structs = frozenset(
        name for name, kind in kinds.items() if types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    )
    binary = {name for name, kind in kinds.items() if types.is_binary(kind) or types.is_large_binary(kind)}
    media = [name for name in kinds if name in structs | binary]
    known = {name: kind for kind, medium in MEDIA.items() for name in medium.columns if name in media}
    free = [name for name in media if name not in known and name not in masks]
    image = next((name for name, kind in known.items() if kind == (modality or kind)), None)
    if image is None and free and modality in (None, "image"):
        known, image = {free[0]: "image"}, free[0]
    if image is None:
        noun = MODALITIES[modality or "image"].noun
        raise ImageError(
            f"{path}: no column holds {noun}s (columns: {_listed(kinds)}); expected one like "
            f"{next(iter(MEDIA[modality or 'image'].columns))!r}, with the bytes of a file in each row, as Hugging "
            "Face datasets write it"
        )
    mask = next((name for name in masks if name in media and name != image), None)
    box = next((name for name in BOXES if name in kinds and "list" in str(kinds[name])), None)
    return Columns(known[image], image, mask, box, structs)


def _label_column(path: Path, schema: Any, column: str | None) -> str | None:
    """Check a label column, or choose one; None if nothing in the file is a label."""
    whole = [field.name for field in schema if _arrow().types.is_integer(field.type)]
    texts = [field.name for field in schema if _is_text(field.type)]
    if column is not None and column not in (*whole, *texts):
        raise InvalidOption(
            f"labels={column!r}: {path} has no such label column; expected one of {_listed([*whole, *texts])}"
        )
    return column or (LABEL if LABEL in (*whole, *texts) else likely_label(whole))


def _names_beside(numbers: Sequence[int | None], texts: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the names of class numbers from a column of texts beside them."""
    named = {number: text for number, text in zip(numbers, texts, strict=True) if number is not None and text}
    if not named or max(named) >= MAX_CLASSES:
        return None
    return tuple(clean(named.get(number, str(number))) for number in range(max(named) + 1))


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ImageError(f"{path}: there is no such file; expected a parquet file")
    _arrow()
    reader: Any = import_module("pyarrow.parquet")
    remote = isinstance(path, RemoteFile)
    return _guarded(path, lambda: reader.ParquetFile(path.open("rb") if remote else path, memory_map=not remote))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, _arrow().ArrowException) as error:
        raise ImageError(
            f"{path}: not a parquet file, or damaged ({_reason(error)}); fetch or write it again"
        ) from error


def _arrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ImageError("reading parquet files needs pyarrow; pip install vitrail[data]") from error


def _values(column: Any) -> list[Any]:
    """Return a column's values; None for all of a column whose text is not valid UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [None] * len(column)


def _declared_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """Return the class names that Hugging Face wrote into the file's metadata."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(clean(str(name)) for name in names) if isinstance(names, list) else None


def _is_text(kind: Any) -> bool:
    types = _arrow().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _listed(names: Any) -> str:
    return ", ".join(repr(clean(name)) for name in names) or "none"


def _reason(error: BaseException) -> str:
    return clean(" ".join(str(error).split()))[:200] or type(error).__name__
