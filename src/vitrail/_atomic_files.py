"""Atomic file writes (a temporary file next to the target, renamed on success) and directory locks."""

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
def temporary_files(*paths: Path) -> Iterator[list[Path]]:
    """Yield temporary files, renamed on success.

    On failure the targets are unchanged and the temporary files are deleted. An ``OSError`` names the target, not the
    temporary file.
    """
    temporary = [path.with_name(f".{_beginning(path.name)}.{secrets.token_hex(4)}.tmp") for path in paths]
    try:
        for file in temporary:
            file.touch(exist_ok=False)
        yield temporary
        rename_all(dict(zip(temporary, paths, strict=True)))
    except OSError as error:
        targets = {str(file): str(path) for file, path in zip(temporary, paths, strict=True)}
        error.filename = targets.get(str(error.filename), error.filename)
        raise
    finally:
        for file in temporary:
            with suppress(OSError):
                file.unlink()


def _beginning(name: str) -> str:
    """Return the beginning of a name, so that a temporary one is never too long for the file system."""
    return os.fsdecode(os.fsencode(name)[:200]).encode("utf-8", "ignore").decode("utf-8")


def resolved(path: Path) -> Path:
    """Return a path without symbolic links, or the absolute path where they lead in a circle or too far."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def rename_all(targets: Mapping[Path, Path]) -> None:
    """Flush files to disk, then rename each to its target in order; rename none if a target is a directory."""
    for file in targets:
        with file.open("r+b") as handle:
            os.fsync(handle.fileno())
    for path in targets.values():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    for file, path in targets.items():
        file.replace(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by everyone."""
    with temporary_files(path) as (file,):
        file.write_bytes(data)
        file.chmod(0o644)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Lock a directory; raise ``BlockingIOError`` if another process holds the lock.

    The lock ends with the process. Where the system or the disk has no locks, this does nothing.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
