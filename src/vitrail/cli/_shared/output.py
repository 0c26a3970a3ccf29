"""Output files: written atomically, and never over an input."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from PIL import Image

from vitrail._atomic_files import resolved, temporary_files
from vitrail._checks import as_path
from vitrail.data import Dataset
from vitrail.data.sources.base import clean
from vitrail.drawing.film import Film
from vitrail.errors import VitrailError


class OutputError(VitrailError):
    """Results could not be written."""


MAX_STEM = 180
"""Most bytes of a result's file name without its ending."""


def check_writable(path: Path, option: str) -> None:
    """Raise early, before minutes of work, if a file cannot be written; ``option`` is the option that named it."""
    with _explained(path, option):  # also a name that is too long
        if path.is_dir() or not path.parent.is_dir():
            raise OutputError(
                f"{option} {path}: no file can be written there. Expected a file name in an existing directory."
            )
        if _is_special(path):
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], option: str = "-o") -> None:
    """Write a file so that a reader sees the old or the new content, and a failure keeps the old.

    Pipes and devices, like ``/dev/stdout``, are written directly.
    """
    with (
        _explained(path, option),
        nullcontext([path]) if _is_special(path) else temporary_files(path) as (target,),
        target.open("wb") as file,
    ):
        write(file)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _explained(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}). Name another file with {option}, in a writable "
            "directory with enough space."
        ) from error


def write_image(path: Path, image: Image.Image) -> None:
    """Write an image as PNG, atomically."""
    write_atomically(path, lambda file: image.save(file, format="PNG"))


def write_drawing(path: Path, drawing: Image.Image | Film) -> None:
    """Write an image as PNG, or a film, atomically."""
    if isinstance(drawing, Film):
        write_atomically(path, drawing.save)
    else:
        write_image(path, drawing)


def write_text(path: Path, text: str, option: str = "-o") -> None:
    """Write a text file, atomically."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8", "replace")), option)


def make_directory(path: Path) -> Path:
    """Create a directory for results, with its parents, and return its absolute path."""
    try:
        as_path("out", path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path}: the output directory could not be made ({error.strerror or error}). Name another one with -o."
        ) from error
    return resolved(path)


class Names:
    """File names for results, after their samples; they collide neither with each other nor with an input.

    Results of ``cat.jpg`` are called ``cat``, those of ``dogs/rex.jpg`` beside it ``dogs-rex``; ``cat.gif`` and
    ``cat.webp`` keep their suffixes. Case is ignored, as on some file systems. With ``by_stem`` directories play no
    part: a name tells nothing about where its file lies.
    """

    def __init__(self, directory: Path, dataset: Dataset, *, by_stem: bool = False) -> None:
        self.directory = directory
        paths = dataset.paths or [Path(re.sub(r"[^\w./-]+", "-", name)) for name in dataset.names]
        inputs = [Path(os.path.normpath(Path(path).absolute())) for path in paths]
        root = os.path.commonpath([path.parent for path in inputs])
        full = [path.name if by_stem else "-".join(path.relative_to(root).parts) for path in inputs]
        count = Counter(Path(label).stem.casefold() for label in full)
        self.labels = [label if count[Path(label).stem.casefold()] > 1 else Path(label).stem for label in full]
        self.taken = {str(resolved(Path(path))).casefold() for path in paths}

    def of(self, index: int, endings: Iterable[str] | Mapping[str, str]) -> dict[str, Path]:
        """Return the files for the results of a sample, by ending: PNG files, or with the suffix of each ending."""
        suffixes = endings if isinstance(endings, Mapping) else dict.fromkeys(endings, ".png")
        number = 1
        while True:
            stem = _shortened(clean(self.labels[index])) + (f"-{number}" if number > 1 else "")
            paths = {ending: self.directory / f"{stem}-{ending}{suffix}" for ending, suffix in suffixes.items()}
            keys = {str(resolved(path)).casefold() for path in paths.values()}
            if self.taken.isdisjoint(keys):
                self.taken |= keys
                return paths
            number += 1


def _shortened(stem: str) -> str:
    """Return a file name that leaves room for an ending: file systems take 255 bytes."""
    data = stem.encode()
    if len(data) <= MAX_STEM:
        return stem
    digest = hashlib.sha256(data).hexdigest()[:8]  # names that differ at their end alone stay different
    return f"{data[: MAX_STEM - 9].decode('utf-8', 'ignore')}-{digest}"
