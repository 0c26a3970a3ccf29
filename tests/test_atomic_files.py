"""Atomic writes of one or several files, and directory locks."""

import os
import stat
from pathlib import Path

import pytest

from vitrail._atomic_files import directory_lock, temporary_files, write_bytes


def write_two(folder: Path, failure: BaseException | None = None) -> None:
    with temporary_files(folder / "a", folder / "b") as files:
        for file in files:
            file.write_text("new")
        if failure is not None:
            raise failure


def texts(folder: Path) -> dict[str, str]:
    return {path.name: "folder" if path.is_dir() else path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_failure_leaves_the_old_files_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(type(failure)):
        write_two(tmp_path, failure)
    assert texts(tmp_path) == {"a": "old"}


def test_no_file_is_renamed_if_a_target_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_two(tmp_path)
    assert error.value.filename == str(tmp_path / "b")
    assert texts(tmp_path) == {"a": "old", "b": "folder"}


def test_all_files_are_flushed_before_the_first_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append((tmp_path / "a").exists()))
    write_two(tmp_path)
    assert flushed == [False, False]
    assert texts(tmp_path) == {"a": "new", "b": "new"}


def test_errors_name_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(OSError, match="Errno") as error:
            write_two(folder)
        assert error.value.filename == str(folder / "a")


def test_written_files_are_readable_by_everyone(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_bytes(tmp_path / "a", b"text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_directory_is_locked_once(tmp_path: Path) -> None:
    with directory_lock(tmp_path), pytest.raises(BlockingIOError), directory_lock(tmp_path):
        pytest.fail("locked twice")
    with directory_lock(tmp_path):
        assert not list(tmp_path.iterdir())


def test_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with directory_lock(tmp_path), directory_lock(tmp_path):
        pass
    monkeypatch.setattr("vitrail._atomic_files.fcntl", None)
    with directory_lock(tmp_path), directory_lock(tmp_path):
        pass
