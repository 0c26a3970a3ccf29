"""Where results are written: a local directory, or one of any file system that fsspec opens (s3://, gs://, …)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from vitrail._atomic_files import directory_lock, temporary_files, write_bytes
from vitrail.data.remote import file_system, is_remote
from vitrail.errors import EmbeddingError


class Storage(ABC):
    """A directory. Files appear whole or not at all."""

    path: str

    @abstractmethod
    def create(self) -> None:
        """Create the directory with its parents, where there are directories."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes] | None:
        """Open a file for reading, at any place; None if there is none."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Yield a stream; what was written to it becomes the file at the end of the block, if that succeeds."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file if it is there."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files and directories in it, sorted; empty if it does not exist."""

    @abstractmethod
    def inside(self, name: str) -> Storage:
        """Return a directory inside."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the directory and the files in it."""

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory against other processes of this machine, where that is possible."""
        return nullcontext()


class LocalStorage(Storage):
    """A directory of this machine, or one that it mounts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, str(folder)

    def create(self) -> None:
        with explained(self.path):
            self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        with explained(str(path)):
            return path.read_bytes() if path.is_file() else None

    def open(self, name: str) -> IO[bytes] | None:
        path = self._folder / name
        with explained(str(path)):
            return path.open("rb") if path.is_file() else None

    def size(self, name: str) -> int | None:
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        with explained(str(self._folder / name)):
            write_bytes(self._folder / name, data)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        with explained(str(self._folder / name)), temporary_files(self._folder / name) as (file,):
            with file.open("wb") as stream:
                yield stream
            file.chmod(0o644)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []

    def inside(self, name: str) -> Storage:
        return LocalStorage(self._folder / name)

    def discard(self) -> None:
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.is_file():
                    path.unlink()
            with suppress(OSError):
                self._folder.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        try:
            with explained(self.path, BlockingIOError), directory_lock(self._folder):
                yield
        except BlockingIOError as error:
            raise EmbeddingError(
                f"{self.path} is in use by another run; wait for it, or name another output with -o"
            ) from error


class RemoteStorage(Storage):
    """A directory of a file system of fsspec; stores of objects show a file once it is whole."""

    def __init__(self, url: str) -> None:
        self.path = url.rstrip("/")
        self._system, self._root = file_system(self.path)

    def create(self) -> None:
        with explained(self.path):
            self._system.makedirs(self._root, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        with explained(f"{self.path}/{name}"):
            place = self._place(name)
            return bytes(self._system.cat_file(place)) if self._system.isfile(place) else None

    def open(self, name: str) -> IO[bytes] | None:
        with explained(f"{self.path}/{name}"):
            place = self._place(name)
            return self._system.open(place, "rb") if self._system.isfile(place) else None

    def size(self, name: str) -> int | None:
        place = self._place(name)
        return int(self._system.size(place)) if self._system.isfile(place) else None

    def write(self, name: str, data: bytes) -> None:
        with explained(f"{self.path}/{name}"):
            self._system.pipe_file(self._place(name), data)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        with explained(f"{self.path}/{name}"), self._system.open(self._place(name), "wb") as stream:
            yield stream

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._place(name))

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        if not self._system.isdir(self._root):
            return []
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in self._system.ls(self._root, detail=False))

    def inside(self, name: str) -> Storage:
        return RemoteStorage(f"{self.path}/{name}")

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            self._system.rm(self._root, recursive=True)

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_storage(path: str | Path) -> Storage:
    """Return a directory, which need not exist."""
    text = str(path)
    if text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    return RemoteStorage(text) if is_remote(text) else LocalStorage(Path(text).expanduser())


def absolute(path: str) -> str:
    """Return a path that means the same in other processes; a ``/`` behind it stays."""
    if is_remote(path):
        return path
    return str(Path(path).expanduser().absolute()) + ("/" if path.endswith("/") else "")


def split(path: str | Path) -> tuple[Storage, str]:
    """Return the directory that a file is in, and the file's name."""
    parent, slash, name = str(path).rstrip("/").rpartition("/")
    return open_storage(parent if slash and parent else "/" if slash else "."), name


@contextmanager
def explained(path: str, *passed: type[BaseException]) -> Iterator[None]:
    """Turn errors of a file system into ours; those in ``passed`` stay."""
    try:
        yield
    except passed:
        raise
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise EmbeddingError(
            f"{path} could not be read or written ({why}); check the path and permissions, or name another output with "
            "-o"
        ) from error
