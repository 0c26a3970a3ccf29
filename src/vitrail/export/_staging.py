"""Staging: files are written to a temporary directory and moved to their place once verified."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail._atomic_files import rename_all
from vitrail.errors import ExportError


@contextmanager
def staging(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``, removed on exit; raise ``ExportError`` if nothing can be written."""
    if path.is_dir():
        raise ExportError(f"{path} is a directory; expected a file name")
    directory: str | None = None
    try:
        directory = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        yield Path(directory)
    except OSError as error:
        raise ExportError(
            f"{path} could not be written ({error.strerror or error}); choose a writable directory with enough space"
        ) from error
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def publish(directory: Path, path: Path) -> tuple[Path, ...]:
    """Move the files of a staging directory beside ``path``, ``path`` itself last; return them, ``path`` first."""
    staged = sorted(directory.iterdir(), key=lambda file: file.name == path.name)
    targets = {file: path.with_name(file.name) for file in staged}
    rename_all(targets)
    return tuple(reversed(targets.values()))
