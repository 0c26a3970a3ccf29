"""Webdataset shards: tar files with images and other files of each sample."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.files import encoded, shard
from tests.data.test_dataset import numbers
from vitrail.data import open_dataset
from vitrail.data.sources.shards import find_shards
from vitrail.errors import ImageError, InvalidOption


def files(start: int, count: int) -> dict[str, dict[str, Any]]:
    return {f"{number:04}": {"png": encoded(number), "cls": number % 3} for number in range(start, start + count)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        shard(tmp_path / f"set-{number:03}.tar", files(4 * number, 4))
    return tmp_path


@pytest.mark.parametrize("source", ["wds:{}/set-{{000..002}}.tar", "{}/set-*.tar", "{}", "wds:{}/set-00{{0,1,2}}.tar"])
def test_shards_one_after_the_other(folder: Path, source: str) -> None:
    dataset = open_dataset(source.format(folder), labeled=True)
    assert dataset.classes == {"label": ("0", "1", "2")}
    assert numbers(dataset) == list(range(12))
    assert dataset.labels[:, 0].tolist() == [number % 3 for number in range(12)]
    assert dataset.names[5] == "0005.png"


def test_paths_of_shards(folder: Path) -> None:
    dataset = open_dataset([folder / "set-002.tar", folder / "set-000.tar"], labeled=True)
    assert numbers(dataset) == [8, 9, 10, 11, 0, 1, 2, 3]


def test_a_shard_that_is_named_with_its_folder_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    dataset = open_dataset(["set-001.tar", folder, f"{folder}/set-*.tar"], labeled=True)
    assert numbers(dataset) == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]


def test_columns(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "set.tar",
        {
            "x/a": {"jpg": encoded(0), "json": {"breed": "pug", "age": 3, "tags": ["x"]}, "colour": b"red"},
            "x/b": {"json": {"breed": "cat", "age": 1}, "seg.png": b"", "webp": encoded(1), "colour": b"blue"},
            "y/b": {"png": encoded(2), "json": {"breed": "pug"}, "colour": b"red", "txt": b"\xff"},
        },
    )
    dataset = open_dataset(path, labels=("breed", "colour"), labeled=True)
    assert dataset.classes == {"breed": ("cat", "pug"), "colour": ("blue", "red")}
    assert dataset.labels.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert numbers(dataset) == [0, 1, 2]
    assert open_dataset(path, labels=("age",), labeled=True).num_unlabeled == 1
    with pytest.raises(InvalidOption, match=r"labels='kind'.*age, breed, colour"):
        open_dataset(path, labels=("kind",), labeled=True)
    with pytest.raises(ImageError, match="none of the 3 samples has a label"):
        open_dataset(path, labeled=True)


def test_images_alone(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "set.tar", {"a": {"png": encoded(3)}, "b": {"txt": b"no picture"}, "c": {"png": encoded(4)}}
    )
    assert numbers(open_dataset(path, labels=None)) == [3, 4]


def test_broken_shards(tmp_path: Path, folder: Path) -> None:
    whole = (folder / "set-000.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[:3000])
    with pytest.raises(ImageError, match=r"cut.tar: not a tar file"):
        open_dataset(cut, labeled=True)
    damaged = tmp_path / "damaged.tar"
    second = whole.index(b"0001.png")
    damaged.write_bytes(whole[:second] + b"\x01" * 512 + whole[second + 512 :])
    with pytest.raises(ImageError, match="damaged header"):
        open_dataset(damaged, labeled=True)
    packed = tmp_path / "packed.tar"
    packed.write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(ImageError, match="without compression"):
        open_dataset(packed, labeled=True)
    empty = shard(tmp_path / "empty.tar", {})
    with pytest.raises(ImageError, match="no images found"):
        open_dataset(empty, labeled=True)
    wrong = shard(tmp_path / "wrong.tar", {"a": {"png": encoded(0), "json": b"{"}})
    with pytest.raises(ImageError, match=r"wrong.tar, a.json: cannot be read"):
        open_dataset(wrong, labeled=True)


def test_a_shard_that_changes_under_us(folder: Path) -> None:
    dataset = open_dataset(folder / "set-000.tar", labeled=True)
    whole = (folder / "set-000.tar").read_bytes()
    (folder / "set-000.tar").write_bytes(whole[:600])
    with pytest.raises(ImageError, match=r"0002.png: the shard is cut off"):
        dataset.tensor(2, 8)
    (folder / "set-000.tar").unlink()
    with pytest.raises(ImageError, match="the shard cannot be read"):
        dataset.tensor(2, 8)


def test_shards_that_are_not_there(folder: Path) -> None:
    with pytest.raises(ImageError, match=r"set-003.tar: there is no such shard"):
        find_shards(f"{folder}/set-{{000..003}}.tar")
    with pytest.raises(ImageError, match="there is no such shard"):
        open_dataset(f"wds:{folder}/other-*.tar", labeled=True)
