"""Label files: CSV or parquet files whose rows name files, relative to the label file, and label them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitrail._wording import counted
from vitrail.data.decode import read_image
from vitrail.data.labels.masks import PixelReader
from vitrail.data.media.registry import MEDIA, recording, require
from vitrail.data.sample import Sample
from vitrail.data.sources.base import LABEL, Labels, Source, clean, likely_label, number_classes
from vitrail.errors import ImageError, InvalidOption

TABLES = (".csv", ".tsv")
"""Endings of label files; parquet files are label files if they have paths and no bytes."""

PATHS = ("path", "file", "file_name", "filename", "filepath", "file_path")
NONE = ("", "nan", "na", "n/a", "null", "none")
"""Text in a column of numbers of a CSV file that is no number, in lower case."""


class TableSource(Source):
    """The rows of a label file. Columns are named in its first row; one of them names files.

    Args:
        path: the label file.
        columns: its values by column.
        modality: what the files hold, for a list of them.
        masks: how masks, or depth maps, are read.
    """

    def __init__(
        self, path: Path, columns: dict[str, list[Any]], modality: Callable[[list[Path]], str], masks: PixelReader
    ) -> None:
        self._path, self._columns = path, columns
        self._files = _path_column(path, columns)
        given = columns[self._files]
        missing = [row for row, name in enumerate(given) if not isinstance(name, str) or not name.strip()]
        if missing:
            raise InvalidOption(f"{_at(path, missing[0])}: column {self._files!r} names no file; expected a path")
        self.names = [clean(name) for name in given]
        self.paths: Sequence[Path] = [path.parent / name for name in given]
        _check_distinct(path, self.paths)
        if not any(file.exists() for file in self.paths):
            raise ImageError(
                f"{path}: none of the {counted(len(given), 'file')} in column {self._files!r} exists, such as "
                f"{self.paths[0]}; expected paths relative to the folder of the label file"
            )
        self.modality = modality(list(self.paths))
        require(self.modality)
        self._mask = next((name for name in masks.columns if name in columns), None)
        self.has_masks = self._mask is not None
        self._reader = masks.of_column(self._mask or "")

    def labels(self, column: str | None) -> Labels:
        """Return a column of class names or numbers; by default ``label``, or the only one."""
        name = self._default() if column is None else column
        if name is None:
            return Labels([None] * len(self))
        return number_classes([_as_class(value, f"{_at(self._path, row)}: {name}") for row, value in self._rows(name)])

    def values(self, column: str) -> Sequence[Any]:
        return [value for _, value in self._rows(column)]

    def read(self, row: int) -> Sample:
        path, where = self.paths[row], _at(self._path, row)
        if not path.exists():
            raise ImageError(f"{where}: there is no file {path}; check column {self._files!r}")
        if self.modality != "image":
            return Sample(recording(self.modality, path), self.names[row])
        image, mask = read_image(path), None
        if self._mask is not None and (name := self._columns[self._mask][row]) is not None:
            mask = self._reader.read(_read_bytes(self._path.parent / str(name), where), self._mask, image.size, where)
        return Sample(image, self.names[row], None, mask)

    def _rows(self, column: str) -> Sequence[tuple[int, Any]]:
        if column not in self._columns or column in (self._files, self._mask):
            raise InvalidOption(
                f"labels={column!r}: {self._path} has no such label column; expected one of "
                f"{', '.join(map(repr, self._candidates())) or 'none: it has only paths'}"
            )
        return list(enumerate(self._columns[column]))

    def _candidates(self) -> list[str]:
        return [name for name in self._columns if name not in (self._files, self._mask)]

    def _default(self) -> str | None:
        names = self._candidates()
        if LABEL in names or len(names) < 2:
            return LABEL if LABEL in names else next(iter(names), None)
        whole = [name for name in names if all(isinstance(one, int) for one in self._columns[name] if one is not None)]
        likely = likely_label(whole)
        if likely is None:
            raise InvalidOption(f"{self._path} has several columns; choose labels= from {', '.join(map(repr, names))}")
        return likely


def read_csv(path: Path) -> dict[str, list[Any]]:
    """Read a CSV or TSV file as columns: whole numbers, numbers, or text; None for empty fields.

    A column is of numbers if all its values are.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            file.seek(0)
            delimiter = max("\t,;", key=head.count)
            rows = [row for row in csv.reader(file, delimiter=delimiter, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ImageError(f"{path}: cannot be read as CSV in UTF-8 ({error}); write it again") from error
    if len(rows) < 2:
        raise ImageError(f"{path}: the file has no rows; expected names of columns, and a row for each sample")
    names = [clean(name.strip()) for name in rows[0]]
    if len(set(names)) < len(names) or "" in names:
        twice = next((name for name in names if names.count(name) > 1), "")
        raise InvalidOption(f"{path}: column names are missing or repeated ({twice!r}); give each column a name")
    for number, row in enumerate(rows[1:]):
        if len(row) != len(names):
            raise InvalidOption(
                f"{_at(path, number)}: {counted(len(row), 'field')}, and there are {counted(len(names), 'column')}; "
                "quote fields that contain the separator"
            )
    return {name: _typed([row[place].strip() for row in rows[1:]]) for place, name in enumerate(names)}


def names_files(columns: Sequence[str]) -> bool:
    """Return whether one of some text columns names files."""
    return any(name.lower() in _path_names() for name in columns)


def _path_names() -> tuple[str, ...]:
    return (*PATHS, *(name for medium in MEDIA.values() for name in medium.columns))


def _path_column(path: Path, columns: dict[str, list[Any]]) -> str:
    by_name = {name.lower(): name for name in columns}
    found = next((by_name[name] for name in _path_names() if name in by_name), None)
    if found is None:
        raise InvalidOption(
            f"{path}: no column names files (columns: {', '.join(map(repr, columns))}); call it 'path', or "
            f"{', '.join(map(repr, PATHS[1:]))}"
        )
    return found


def _check_distinct(path: Path, files: Sequence[Path]) -> None:
    rows: dict[Path, int] = {}
    for row, file in enumerate(files):
        first = rows.setdefault(Path(*file.parts), row)
        if first != row:
            raise InvalidOption(
                f"{_at(path, row)}: {file.name} is in row {first + 2}, too; expected each file once. List several "
                "classes of a file in one field, such as cat;small, with kind='multilabel'"
            )


def _typed(values: list[str]) -> list[Any]:
    known = [None if value.lower() in NONE else value for value in values]
    for kind in (int, float):
        try:
            return [None if value is None else kind(value) for value in known]
        except ValueError:
            continue
    return [value or None for value in values]


def _as_class(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | int):
        return int(value) if isinstance(value, bool) else value
    raise InvalidOption(f"{where} is {value!r:.80}; expected a class name or number. For values, use kind='regression'")


def _read_bytes(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{where}: its mask {path} cannot be read ({error.strerror or error})") from error


def _at(path: Path, row: int) -> str:
    """Name a row as spreadsheets number them, the names of the columns being the first."""
    return f"{path.name}, row {row + 2}"
