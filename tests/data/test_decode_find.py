"""Files and folders become a list of images."""

from pathlib import Path

import pytest

from vitrail.data import find_images
from vitrail.errors import ImageError


def test_find_lists_directories_recursively_sorted_without_hidden_and_others(tmp_path: Path) -> None:
    names = [
        "b.PNG",
        "a.jpg",
        "sub/c.webp",
        "sub/notes.txt",
        ".hidden.png",
        ".git/d.png",
        "README",
        "zzz/e.tiff",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in find_images([tmp_path])]
    assert found == ["a.jpg", "b.PNG", "sub/c.webp", "zzz/e.tiff"]


def test_find_keeps_named_files_whatever_they_are_called_and_lists_each_once(tmp_path: Path) -> None:
    for name in ("one.png", "two.data", ".three.png"):
        (tmp_path / name).touch()
    given = [tmp_path / "two.data", tmp_path, tmp_path / ".three.png", str(tmp_path / "two.data")]
    assert find_images(given) == [tmp_path / "two.data", tmp_path / "one.png", tmp_path / ".three.png"]


def test_find_takes_one_path(tmp_path: Path) -> None:
    (tmp_path / "one.png").touch()
    assert find_images(str(tmp_path)) == find_images(tmp_path) == [tmp_path / "one.png"]


def test_find_refuses_a_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere: there is no such file"):
        find_images([tmp_path, tmp_path / "nowhere"])


def test_find_refuses_to_find_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ImageError, match=r"no images found.*\.jpeg"):
        find_images([tmp_path])
    with pytest.raises(ImageError, match="in nothing"):
        find_images([])


def test_find_refuses_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ImageError, match=r"the folder cannot be listed \(Permission denied\)"):
        find_images([tmp_path])
