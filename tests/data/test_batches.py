"""Batches: every accepted input gives the same batches, also in part and when repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vitrail.data import InputSpec, open_dataset
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import ImageError, InvalidOption, UnsupportedInput

EXPECTS = InputSpec((8, 8))
COUNT = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(COUNT):
        Image.effect_noise((12, 10), 30 + 10 * number).convert("RGB").save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.fixture
def images(folder: Path) -> Tensor:
    return next(open_dataset(folder).batches(EXPECTS, COUNT)).images


def walk(opened: Batches, batch_size: int | None = 3, rank: int = 0, world: int = 1) -> tuple[list[int], Tensor]:
    pieces = list(opened.batches(EXPECTS, batch_size, rank, world))
    found = torch.cat([piece.images for piece in pieces]) if pieces else torch.zeros(0)
    return [index for piece in pieces for index in piece.indices], found


def kinds(folder: Path, images: Tensor) -> list[Any]:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=2)
    return [folder, str(folder), sorted(folder.iterdir()), open_dataset(folder), images, images.split(2), loader]


def test_every_kind_of_data_is_the_same_images(folder: Path, images: Tensor) -> None:
    for data in kinds(folder, images):
        opened = open_batches(data)
        for _ in range(2):  # and again
            indices, found = walk(opened)
            assert indices == list(range(COUNT))
            assert torch.equal(found, images)
        assert not opened.runs_once
        assert opened.repeatable() is opened


def test_numpy_images_are_those_of_pil(folder: Path, images: Tensor) -> None:
    """In bytes or from 0 to 1, alone, in a list or stacked; floating point arrays (B, C, H, W) are preprocessed."""
    pixels = np.stack([np.asarray(Image.open(path)) for path in sorted(folder.iterdir())])
    for data in (pixels, list(pixels), pixels / 255, list((pixels / 255).astype(np.float32)), images.numpy()):
        assert torch.equal(walk(open_batches(data))[1], images)
    for data in (images.double().numpy(), [images[:4].numpy(), (images[4:].numpy(),)]):
        assert torch.equal(walk(open_batches(data))[1], images)
    for data in (pixels[0], pixels[0] / 255):
        assert torch.equal(walk(open_batches(data))[1], images[:1])
    for data in (pixels, images.numpy()):
        (batch,) = open_batches(data, labels=range(COUNT)).batches(EXPECTS, COUNT)
        assert batch.labels is not None
        assert batch.labels.tolist() == list(range(COUNT))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.full((4, 4, 3), 7.0), "not an image"),
        (np.zeros((4, 4, 2), np.uint8), "not an image"),
        (np.zeros((4, 4), np.int32), "not an image"),
        (np.zeros((2, 3, 4), dtype=object), "not an image"),
    ],
)
def test_other_arrays_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        walk(open_batches(data))


def test_some_images_are_those_with_their_numbers(folder: Path, images: Tensor) -> None:
    for data in kinds(folder, images):
        indices, found = walk(open_batches(data).select([5, 0, 3]))
        assert indices == [0, 3, 5]
        assert torch.equal(found, images[[0, 3, 5]])
        assert walk(open_batches(data).select([]))[0] == []


def test_no_more_files_are_read_than_requested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection, read = open_dataset(folder), []
    usual = type(collection).read
    monkeypatch.setattr(type(collection), "read", lambda self, index: read.append(index) or usual(self, index))
    walk(open_batches(collection).select([2, 6]))
    assert read == [2, 6]


def test_batches_end_at_the_limit(images: Tensor) -> None:
    made: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for number, batch in enumerate(images.split(2)):
                made.append(number)
                yield batch

    assert walk(open_batches(Loader()).select([1]))[0] == [1]
    assert made == [0]
    assert walk(open_batches(Loader(), limit=3))[0] == [0, 1, 2]
    assert made == [0, 0, 1]


def test_shares_of_all_ranks_form_the_dataset(folder: Path, images: Tensor) -> None:
    for data in kinds(folder, images):
        parts = [walk(open_batches(data), 2, rank, 3)[0] for rank in range(3)]
        assert sorted(index for part in parts for index in part) == list(range(COUNT))


def test_iterators_run_once_and_are_cached_on_request(images: Tensor) -> None:
    opened = open_batches(iter(images.split(2)))
    assert opened.runs_once
    lasting = opened.repeatable()
    assert not lasting.runs_once
    assert torch.equal(walk(lasting)[1], images)
    assert torch.equal(walk(lasting)[1], images)


def test_batch_sizes(folder: Path, images: Tensor) -> None:
    assert [len(piece.images) for piece in open_batches(images).batches(EXPECTS)] == [COUNT]
    pieces = list(open_batches(images).batches(EXPECTS, 3))
    assert [len(piece.images) for piece in pieces] == [3, 3, 1]
    assert pieces[0].images.data_ptr() == images.data_ptr()  # not copied
    assert [len(piece.images) for piece in open_batches(folder).batches(EXPECTS)] == [COUNT]
    for wrong in (0, True, "2", 1.5):
        with pytest.raises(InvalidOption, match="batch_size"):
            next(open_batches(images).batches(EXPECTS, wrong))  # type: ignore[arg-type]


def test_second_parts_of_batches_count_only_as_labels(images: Tensor) -> None:
    masks = [(images, torch.zeros(COUNT, 8, 8))]
    assert walk(open_batches(masks, with_labels=False))[0] == list(range(COUNT))
    with pytest.raises(UnsupportedInput, match="one whole number"):
        walk(open_batches(masks))


@pytest.mark.parametrize("data", [None, 7, torch.zeros(3, 8, 8), torch.zeros(0, 3, 8, 8)])
def test_other_objects_than_images_are_refused(data: Any) -> None:
    with pytest.raises(UnsupportedInput, match="got"):
        open_batches(data)
