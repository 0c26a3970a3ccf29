"""Webdataset shards: tar files with one file after the other for each example, read with the standard library.

A tar file that is not compressed says in front of each file how long it is. All headers are read once, when shards are
opened; after that every picture has a place, any example can be asked for, and each process reads what it needs and
nothing else: shards need no dealing out among processes or workers, and a run goes on exactly from any step.
"""

from __future__ import annotations

import json
import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from vitrail.data.decode import EXTENSIONS, decode_image
from vitrail.data.sample import clean
from vitrail.data.sources.labelled import Decode, Labelled, numbered
from vitrail.errors import ImageError, InvalidOption

LABELS = ("cls", "label", "class")
"""Which column says the class, where nobody names one: a file ``NAME.cls``, or a field of ``NAME.json``."""

MAX_TEXT = 1_000_000
"""Longer files beside a picture are not looked into."""


class ShardPictures:
    """The examples of tar files, one after the other.

    Columns of classes are the fields of ``NAME.json``, and the files ``NAME.COLUMN`` that hold a number or a word.

    Attributes:
        names: what to call each picture: its file's name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._shards, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self.names: list[str] = []
        self._columns: dict[str, dict[int, Any]] = {}
        for number, path in enumerate(self._paths):
            for name, place, texts in _examples(path):
                row = len(self.names)
                self.names.append(clean(name))
                self._shards.append(number)
                self._offsets.append(place[0])
                self._sizes.append(place[1])
                for column, value in texts.items():
                    self._columns.setdefault(column, {})[row] = value
        if not self.names:
            raise ImageError(f"{self._paths[0]}: no pictures found in {len(self._paths)} shards.")

    def labels(self, column: str | None) -> Labelled:
        if column is None:
            column = next((name for name in LABELS if name in self._columns), None)
            if column is None:
                return Labelled([None] * len(self.names), None)
        if column not in self._columns:
            raise InvalidOption(
                f"labels={column!r}: the shards have no such column of classes. Expected one of "
                f"{', '.join(sorted(self._columns)) or 'none: there is nothing beside the pictures'}."
            )
        found = self._columns[column]
        return numbered([found.get(row) for row in range(len(self.names))])

    def fetch(self, row: int) -> Decode:
        path, size = self._paths[self._shards[row]], self._sizes[row]
        called = f"{path.name}, {self.names[row]}"
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[row])
                data = file.read(size)
        except OSError as error:
            raise ImageError(f"{path}: the shard cannot be read ({error.strerror}). Check that it is there.") from error
        if len(data) < size:
            raise ImageError(f"{called}: the shard ends before the picture does. Fetch or write it again.")
        return partial(decode_image, data, called)


def find_shards(source: str) -> list[Path]:
    """Find tar files by a pattern: ``{000..012}`` counts, ``{a,b}`` lists, ``*`` stands for anything; or a folder.

    Raises:
        ImageError: there is no such file.
    """
    found: list[Path] = []
    for text in _spelt_out(source):
        path = Path(text)
        if path.is_dir():
            matches = sorted(path.glob("*.tar"))
        elif any(letter in text for letter in "*?["):
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            matches = sorted(anchor.glob(str(path.relative_to(anchor))))
        else:
            matches = [path]
        if not matches or not all(match.is_file() for match in matches):
            raise ImageError(f"{text}: there is no such shard. Expected tar files. Check the path and the numbers.")
        found += matches
    return found


def _spelt_out(source: str) -> Iterator[str]:
    pieces = re.split(r"\{([^{}]*)\}", source)
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        counted = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
        if number % 2 == 0:
            choices.append([piece])
        elif counted:
            first, last = counted.groups()
            choices.append([str(one).zfill(len(first)) for one in range(int(first), int(last) + 1)])
        else:
            choices.append(piece.split(","))
    return ("".join(parts) for parts in product(*choices))


def _examples(path: Path) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
    """Give each example of a shard: the picture's name, where its bytes are and how many, and what is beside it."""
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
    """Read the headers of a shard, and the short files that are no pictures."""
    try:
        end = 0
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # headers are not needed again, and shards are long
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if not member.isreg() or member.issparse():
                    continue
                text = None
                if member.size <= MAX_TEXT and Path(member.name).suffix.lower() not in EXTENSIONS:
                    file = tar.extractfile(member)
                    text = None if file is None else file.read()
                yield member, text
        with path.open("rb") as rest:  # a damaged header looks like the end
            rest.seek(end)
            if any(rest.read(tarfile.BLOCKSIZE)):
                raise tarfile.ReadError("damaged header")
    except (tarfile.TarError, OSError) as error:
        raise ImageError(
            f"{path}: this is not a tar file, or it is compressed or cut off ({error}). Expected a complete tar file "
            "without compression. Fetch or write it again."
        ) from error


def _values(kind: str, data: bytes, called: str) -> dict[str, Any]:
    """Read what is beside a picture: numbers and words by column."""
    try:
        text = data.decode("utf-8").strip()
        if kind != "json":
            return {kind: int(text) if re.fullmatch(r"-?\d+", text) else text}
        found = json.loads(text)
    except ValueError as error:
        if kind not in ("json", *LABELS):
            return {}  # something else than classes
        raise ImageError(f"{called}: it cannot be read ({error}). Expected text in UTF-8.") from error
    plain = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in plain if isinstance(value, int | str) and not isinstance(value, bool)}
