"""Output files: atomic, and never over an input."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from PIL import Image

from vitrail.cli._shared.output import (
    Names,
    OutputError,
    check_writable,
    make_directory,
    write_atomically,
    write_image,
    write_text,
)
from vitrail.errors import VitrailError


def files(*paths: Path) -> Any:
    """Return a dataset of files."""
    return SimpleNamespace(paths=paths, names=[path.name for path in paths])


def test_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(file: IO[bytes]) -> None:
        file.write(b"half of the new")
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    seen = []

    def write(file: IO[bytes]) -> None:
        file.write(b"new")
        seen.append(path.read_text())

    write_atomically(path, write)
    assert seen == ["old"]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"a\.txt .*\(No space left on device\).*-o"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_directory_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(VitrailError, match="could not be written"):
        write_text(tmp_path / "a.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_text(tmp_path / "ours", "text")
    usual, ours = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "ours"))
    assert ours == usual


def test_check_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a.json", "--json")
    check_writable(Path(os.devnull), "--json")
    assert not list(tmp_path.iterdir())
    for path in (tmp_path, tmp_path / "no" / "a.json"):
        with pytest.raises(OutputError, match="--json"):
            check_writable(path, "--json")

    def refused(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(OutputError, match=r"a\.json .*\(Permission denied\).*--json"):
        check_writable(tmp_path / "a.json", "--json")


def test_pipes_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 99) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_write_image(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", Image.new("RGB", (3, 2), "red"))
    with Image.open(tmp_path / "a.png") as image:
        assert (image.format, image.size, image.getpixel((2, 1))) == ("PNG", (3, 2), (255, 0, 0))


def test_make_directory(tmp_path: Path) -> None:
    assert make_directory(tmp_path / "a" / "b") == (tmp_path / "a" / "b").resolve()
    assert (tmp_path / "a" / "b").is_dir()
    make_directory(tmp_path / "a" / "b")


def test_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file: .*-o"):
        make_directory(tmp_path / "file")


def test_names_do_not_collide(tmp_path: Path) -> None:
    names = Names(
        tmp_path, SimpleNamespace(paths=None, names=["cat.jpg", "cat.jpg", "CAT.jpg", "cat-2.jpg"])
    )  # named alike: numbers are needed
    assert [names.of(index, ["glass"])["glass"].name for index in range(4)] == [
        "cat.jpg-glass.png",
        "cat.jpg-2-glass.png",
        "CAT.jpg-3-glass.png",
        "cat-2-glass.png",
    ]


def test_names_follow_the_images(tmp_path: Path) -> None:
    expected = {
        "sun.jpg": "sun-glass.png",
        "anim.gif": "anim.gif-glass.png",
        "anim.webp": "anim.webp-glass.png",
        "a/cat.jpg": "a-cat-glass.png",
        "b/CAT.jpg": "b-CAT-glass.png",
        "b/../c/cat.png": "c-cat-glass.png",
        "x/same/dog.jpg": "x-same-dog-glass.png",
        "y/same/dog.jpg": "y-same-dog-glass.png",
        "no-suffix": "no-suffix-glass.png",
    }
    names = Names(tmp_path / "out", files(*(tmp_path / name for name in expected)))
    assert [names.of(index, ["glass"])["glass"].name for index in range(len(expected))] == list(expected.values())


def test_symbolic_links_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "cat.jpg").symlink_to(tmp_path / "blob")
    found = Names(tmp_path, files(tmp_path / "cat.jpg")).of(0, ["glass"])
    assert found["glass"].name == "cat-glass.png"


def test_names_avoid_the_inputs(tmp_path: Path) -> None:
    found = Names(tmp_path, files(tmp_path / "cat.jpg", tmp_path / "cat-glass.png")).of(0, ("glass", "side"))
    assert {ending: path.name for ending, path in found.items()} == {
        "glass": "cat-2-glass.png",
        "side": "cat-2-side.png",
    }
