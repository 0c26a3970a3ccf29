"""Files are written whole or not at all, several of them together."""

import os
import stat
from pathlib import Path

import pytest

from vitrail._atomic_files import drafts, held
from vitrail.models.saving import write_whole


def write_two(folder: Path, failure: BaseException | None = None) -> None:
    with drafts(folder / "a", folder / "b") as hidden:
        for draft in hidden:
            draft.write_text("new")
        if failure is not None:
            raise failure


def texts(folder: Path) -> dict[str, str]:
    return {path.name: "folder" if path.is_dir() else path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(type(failure)):
        write_two(tmp_path, failure)
    assert texts(tmp_path) == {"a": "old"}


def test_none_is_moved_where_one_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_two(tmp_path)
    assert error.value.filename == str(tmp_path / "b")
    assert texts(tmp_path) == {"a": "old", "b": "folder"}


def test_all_are_flushed_before_the_first_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append((tmp_path / "a").exists()))
    write_two(tmp_path)
    assert flushed == [False, False]
    assert texts(tmp_path) == {"a": "new", "b": "new"}


def test_errors_name_the_file_and_not_its_draft(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(OSError, match="Errno") as error:
            write_two(folder)
        assert error.value.filename == str(folder / "a")


def test_files_of_models_are_for_everybody_to_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "a", b"text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(BlockingIOError), held(tmp_path):
        pytest.fail("held twice")
    with held(tmp_path):
        assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_locked_all_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with held(tmp_path), held(tmp_path):
        pass
    monkeypatch.setattr("vitrail._atomic_files.fcntl", None)
    with held(tmp_path), held(tmp_path):
        pass
