"""Files that are written whole or not at all: out of sight first, beside where they go, and then moved there.

And folders that are held by one process at a time.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def drafts(*paths: Path) -> Iterator[list[Path]]:
    """Give an empty file out of sight for each path; what was written to them takes its place when all is complete.

    A failure leaves what was there before, and nothing else. An ``OSError`` about a draft names the file it was for.
    """
    hidden = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
    try:
        for draft in hidden:
            draft.touch(exist_ok=False)
        yield hidden
        move(dict(zip(hidden, paths, strict=True)))
    except OSError as error:
        meant = {str(draft): str(path) for draft, path in zip(hidden, paths, strict=True)}
        error.filename = meant.get(str(error.filename), error.filename)
        raise
    finally:
        for draft in hidden:
            with suppress(OSError):
                draft.unlink()


def move(complete: Mapping[Path, Path]) -> None:
    """Flush files to the disk, and then move each to its place, in this order; a folder in the way of one stops all."""
    for draft in complete:
        with draft.open("r+b") as file:
            os.fsync(file.fileno())
    for path in complete.values():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    for draft, path in complete.items():
        draft.replace(path)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder; ``BlockingIOError`` where somebody else does. A process that dies lets go of it.

    On systems and disks that cannot lock, everybody holds everything.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(handle)
