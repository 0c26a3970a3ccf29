"""Files of remote stores (s3://, gs://, …) as sources: found and opened by fsspec, where it is installed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import IO, Any

from vitrail.errors import ImageError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://")


def is_remote(text: str) -> bool:
    """Return whether a path is the address of a file system of fsspec."""
    return _SCHEME.match(text) is not None


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path on it."""
    try:
        core: Any = import_module("fsspec.core")
    except ImportError as error:
        raise ImageError(f"{url}: addresses like s3:// and gs:// need fsspec; pip install fsspec") from error
    try:
        system, path = core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ImageError(
            f"{url}: this file system cannot be opened ({error}); install the package that it names (s3fs for s3://, "
            "gcsfs for gs://)"
        ) from error
    return system, str(path)


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address, with what sources need of a ``pathlib.Path``. Pickles as its address."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Its last part."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """Its ending."""
        return PurePosixPath(self.url).suffix

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open it for reading."""
        system, path = file_system(self.url)
        found: IO[bytes] = system.open(path, mode)
        return found

    def read_bytes(self) -> bytes:
        """Return its content."""
        with self.open() as file:
            return file.read()

    def is_file(self) -> bool:
        """Return whether it exists."""
        system, path = file_system(self.url)
        return bool(system.isfile(path))


def find_remote(url: str, extensions: Collection[str]) -> list[RemoteFile]:
    """Return the file at an address, those that a pattern matches, or those below a directory with such endings."""
    system, path = file_system(url)
    try:
        if any(letter in path for letter in "*?["):
            found = system.glob(path)
        elif system.isfile(path):
            found = [path]
        else:
            found = [one for one in system.find(path) if PurePosixPath(one).suffix.lower() in extensions]
    except Exception as error:  # of any file system: permissions, network, names
        why = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{url}: could not be listed ({why:.200}); check the address and your access") from error
    if not found:
        raise ImageError(
            f"{url}: there is no such file, and no file below it that ends in {', '.join(sorted(extensions))}"
        )
    return [RemoteFile(str(system.unstrip_protocol(one))) for one in sorted(found)]
