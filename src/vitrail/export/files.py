"""A folder out of sight in which files are made, and from where they are moved to their place when they are right."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail._atomic_files import move
from vitrail.errors import ExportError


@contextmanager
def workshop(path: Path) -> Iterator[Path]:
    """Give a folder beside ``path``, gone afterwards, in which files have their names and nobody sees them."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield folder
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, path: Path) -> tuple[Path, ...]:
    """Move finished files to their place, ``path`` itself last, and give all of them, ``path`` first."""
    made = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
    places = {file: path.with_name(file.name) for file in made}
    move(places)
    return tuple(reversed(places.values()))


def _unwritable(path: Path, error: OSError) -> ExportError:
    return ExportError(
        f"{path} could not be written ({error.strerror or error}); expected a folder with space that may be written to"
    )
