"""WebDataset shards: tar files with the files of one sample after the other.

Kept instead of the ``webdataset`` library, which streams: here all headers of an uncompressed tar file are read once,
every image gets an offset, and any sample can be read by any process. Shards need no assignment to ranks or workers,
and a run resumes exactly at any step.
"""

from __future__ import annotations

import json
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from vitrail._wording import counted
from vitrail.data.decode import EXTENSIONS, decode_image
from vitrail.data.sample import Sample
from vitrail.data.sources.base import Labels, Source, clean, matching, number_classes
from vitrail.errors import ImageError, InvalidOption

LABELS = ("cls", "label", "class")
"""Columns that are taken for the label where none is chosen: a file ``NAME.cls``, or a field of ``NAME.json``."""

MAX_TEXT = 1_000_000
"""Longer files beside an image are not read."""


class ShardSource(Source):
    """The samples of tar files, one file after the other.

    Label columns are the fields of ``NAME.json``, and the files ``NAME.COLUMN`` that hold a number or text.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._shards, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._columns: dict[str, dict[int, Any]] = {}
        self.names: list[str] = []
        for number, path in enumerate(self._paths):
            for name, (offset, size), texts in _samples(path):
                for column, value in texts.items():
                    self._columns.setdefault(column, {})[len(self.names)] = value
                self.names.append(clean(name))
                self._shards.append(number)
                self._offsets.append(offset)
                self._sizes.append(size)
        if not self.names:
            raise ImageError(f"{self._paths[0]}: no images found in {counted(len(self._paths), 'shard')}")

    def files(self, rows: Sequence[int]) -> Sequence[Path]:
        return [path for path in self._paths if isinstance(path, Path)]

    def values(self, column: str) -> Sequence[Any]:
        if column not in self._columns:
            raise InvalidOption(
                f"labels={column!r}: the shards have no such column; expected one of {', '.join(sorted(self._columns))}"
            )
        return [self._columns[column].get(row) for row in range(len(self))]

    def labels(self, column: str | None) -> Labels:
        column = column or next((name for name in LABELS if name in self._columns), None)
        if column is None:
            return Labels([None] * len(self))
        if column not in self._columns:
            known = ", ".join(sorted(self._columns)) or "none: there is nothing beside the images"
            raise InvalidOption(f"labels={column!r}: the shards have no such label column; expected one of {known}")
        found = self._columns[column]
        values = [found.get(row) for row in range(len(self))]
        if any(isinstance(value, float | list) for value in values):
            raise InvalidOption(f"labels={column!r}: its values are no classes; choose kind= regression or multilabel")
        return number_classes(values)

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        path, size, name = self._paths[self._shards[row]], self._sizes[row], self.names[row]
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[row])
                data = file.read(size)
        except OSError as error:
            raise ImageError(f"{path}: the shard cannot be read ({error.strerror}); check that it is there") from error
        if len(data) < size:
            raise ImageError(f"{path.name}, {name}: the shard is cut off; fetch or write it again")
        return lambda: Sample(decode_image(data, f"{path.name}, {name}"), name)


def find_shards(source: str) -> list[Path]:
    """Find tar files by a pattern: ``{000..012}`` counts, ``{a,b}`` lists, ``*`` matches anything; or in a folder."""
    found: list[Path] = []
    for text in _expanded(source):
        matches = sorted(Path(text).glob("*.tar")) if Path(text).is_dir() else matching(text)
        if not matches or not all(match.is_file() for match in matches):
            raise ImageError(f"{text}: there is no such shard; check the path and the numbers")
        found += matches
    return found


def _expanded(source: str) -> Iterator[str]:
    """Yield every path that the braces of a pattern stand for."""
    choices: list[list[str]] = []
    for number, piece in enumerate(re.split(r"\{([^{}]*)\}", source)):
        counted = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
        if number % 2 == 0:
            choices.append([piece])
        elif counted:
            first, last = counted.groups()
            choices.append([str(one).zfill(len(first)) for one in range(int(first), int(last) + 1)])
        else:
            choices.append(piece.split(","))
    return ("".join(parts) for parts in product(*choices))


def _samples(path: Path) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
    """Yield each sample of a shard: the image's name, its offset and size, and the values beside it."""
    key: str | None = None
    name = ""
    place: tuple[int, int] | None = None
    texts: dict[str, Any] = {}
    for member, text in _members(path):
        folder, _, file = member.name.rpartition("/")
        stem, _, kind = file.partition(".")
        if f"{folder}/{stem}" != key:
            if place is not None:
                yield name, place, texts
            key, place, texts = f"{folder}/{stem}", None, {}
        kind = kind.lower()
        if f".{kind}" in EXTENSIONS:
            if place is None:
                name, place = member.name, (member.offset_data, member.size)
        elif kind and text is not None:
            texts |= _values(kind, text, f"{path.name}, {clean(member.name)}")
    if place is not None:
        yield name, place, texts


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yield the headers of a shard, with the content of short files that are no images."""
    try:
        end = 0
        with path.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # shards are long, and headers are not needed again
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if not member.isreg() or member.issparse():
                    continue
                text = None
                if member.size <= MAX_TEXT and Path(member.name).suffix.lower() not in EXTENSIONS:
                    file = tar.extractfile(member)
                    text = None if file is None else file.read()
                yield member, text
        with path.open("rb") as rest:  # tarfile takes a damaged header for the end
            rest.seek(end)
            if any(rest.read(tarfile.BLOCKSIZE)):
                raise tarfile.ReadError("damaged header")
    except (tarfile.TarError, OSError) as error:
        raise ImageError(
            f"{path}: not a tar file, or compressed or cut off ({error}); expected a complete tar file without "
            "compression"
        ) from error


def _values(kind: str, data: bytes, name: str) -> dict[str, Any]:
    """Return the numbers and texts of a file beside an image, by column."""
    try:
        text = data.decode("utf-8").strip()
        if kind != "json":
            return {kind: int(text) if re.fullmatch(r"-?\d+", text) else text}
        found = json.loads(text)
    except ValueError as error:
        if kind not in ("json", *LABELS):
            return {}  # no label
        raise ImageError(f"{name}: cannot be read ({error}); expected text in UTF-8") from error
    plain = found.items() if isinstance(found, dict) else ()
    kept = (int, float, str, list)
    return {name: value for name, value in plain if isinstance(value, kept) and not isinstance(value, bool)}
