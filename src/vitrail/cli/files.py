"""Writing results: whole files or none, in a folder of the user's choice, never over what was read."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from PIL import Image

from vitrail._atomic_files import drafts
from vitrail.errors import VitrailError


class OutputError(VitrailError):
    """Results could not be written."""


def check_writable(path: Path, option: str) -> None:
    """Complain now, not after minutes of work, where no file can be written; ``option`` named the place."""
    if path.is_dir() or not path.parent.is_dir():
        raise OutputError(
            f"{option} {path}: no file can be written there. Expected a file's name in a folder that exists. "
            "Make the folder first, or name another one."
        )
    try:
        if _is_special(path):
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _unwritable(path, error, option) from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], option: str = "-o") -> None:
    """Write a file in one step: a reader sees the old one or the new one, and a failure leaves the old one.

    Pipes and devices, like ``/dev/stdout``, are written to as they are: no file may take their place.
    """
    try:
        with nullcontext([path]) if _is_special(path) else drafts(path) as (place,), place.open("wb") as file:
            write(file)
    except OSError as error:
        raise _unwritable(path, error, option) from error


def _is_special(path: Path) -> bool:
    """Whether a path names a pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _unwritable(path: Path, error: OSError, option: str) -> OutputError:
    return OutputError(
        f"{path}: the file could not be written ({error.strerror or error}). Expected a folder with "
        f"space that may be written to. Name another one with {option}."
    )


def write_picture(path: Path, picture: Image.Image) -> None:
    """Write a picture as PNG, in one step."""
    write_atomically(path, lambda file: picture.save(file, format="PNG"))


def write_text(path: Path, text: str, option: str = "-o") -> None:
    """Write a text file in one step."""
    write_atomically(path, lambda file: file.write(text.encode()), option)


def make_folder(path: Path) -> Path:
    """Make the folder for results, with those above it, and give its absolute path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path}: the folder for results could not be made ({error.strerror or error}). Expected a "
            "folder, or a place where one may be made. Name another one with -o."
        ) from error
    return path.resolve()


class Names:
    """Names for results that say which picture they are of, and collide neither with each other nor with a file read.

    ``cat.jpg`` becomes ``cat``. Pictures that would share this name go by more of theirs: ``cat.gif`` and
    ``cat.webp`` stay apart by their whole names, ``a/cat.jpg`` and ``b/cat.jpg`` become ``a-cat`` and ``b-cat``.
    Upper and lower case count as the same, as they do on some file systems.
    """

    def __init__(self, folder: Path, endings: Iterable[str], inputs: Iterable[Path]) -> None:
        self.folder = folder
        self.endings = tuple(endings)
        read = list(inputs)
        self.taken = {str(path.resolve()).casefold() for path in read}
        self.shared = Counter(label for path in read for label in {label.casefold() for label in _labels(path)})

    def for_picture(self, picture: Path) -> dict[str, Path]:
        """Give the files that a picture's results go to, by ending."""
        label = next((label for label in _labels(picture) if self.shared[label.casefold()] <= 1), picture.stem)
        number = 1
        while True:
            stem = label if number == 1 else f"{label}-{number}"
            paths = {ending: self.folder / f"{stem}-{ending}.png" for ending in self.endings}
            keys = {str(path.resolve()).casefold() for path in paths.values()}
            if self.taken.isdisjoint(keys):
                self.taken |= keys
                return paths
            number += 1


def _labels(path: Path) -> Iterator[str]:
    """Give what a picture may be called, from the shortest on."""
    yield path.stem
    yield path.name
    folders = Path(os.path.normpath(path.absolute())).parent.parts[1:]
    for start in reversed(range(len(folders))):
        before = "-".join(folders[start:])
        yield f"{before}-{path.stem}"
        yield f"{before}-{path.name}"
