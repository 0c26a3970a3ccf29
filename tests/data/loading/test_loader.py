"""Data loaders: the same batches wherever images are kept, for any world size, from any step on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.files import class_folders, encoded, shard, table
from vitrail.data import Dataset, open_dataset
from vitrail.data.loading import loader as module
from vitrail.data.loading.loader import LoadedBatch, Loader, make_loader
from vitrail.data.loading.memory import InMemoryLoader
from vitrail.data.loading.workers import WorkerLoader
from vitrail.errors import ImageError, InvalidOption, TrainingError

KINDS = ["device", "workers"]


def loader(dataset: Dataset, keep: Any, **more: Any) -> Loader:
    return make_loader(
        dataset, **{"image_size": 12, "batch": 4, "seed": 3, "device": "cpu", "keep": keep, "workers": 0} | more
    )


def same(one: LoadedBatch, other: LoadedBatch) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return open_dataset(class_folders(tmp_path / "set", 12), labeled=True)


@pytest.fixture
def damaged(tmp_path: Path) -> Dataset:
    """By index: 0 1 2 3 4 5 are images 0 2 4 6 8 10, and 6 to 11 are 1 3 5 7 9 11."""
    return open_dataset(class_folders(tmp_path / "damaged", 12, broken=(4, 6, 11)), labeled=True)


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("keep", KINDS)
def test_batches_follow_the_order(dataset: Dataset, keep: str) -> None:
    made = loader(dataset, keep)
    assert (made.count, made.steps_per_epoch, made.image_size) == (12, 3, 12)
    assert made.classes == {"label": ("a", "b")}
    batch = made.batch(0)
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 12, 12), torch.uint8)
    for image, label, index in zip(*batch, strict=True):
        assert torch.equal(image, dataset.tensor(int(index), 12))
        assert torch.equal(label, dataset.labels[index])
    epoch = torch.cat([made.batch(step).indices for step in range(3)])
    assert epoch.sort().values.tolist() == list(range(12))
    assert made.skipped == []
    made.close()


def source(kind: str, folder: Path) -> Dataset:
    if kind == "folders":
        return open_dataset(class_folders(folder / "set", 12), labeled=True)
    if kind == "parquet":
        return open_dataset(table(folder / "set.parquet", 12, label=[0, 1] * 6), labeled=True)
    files = {str(number): {"png": encoded(number), "cls": number % 2} for number in range(12)}
    return open_dataset(shard(folder / "set.tar", files), labeled=True)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("kind", ["folders", "parquet", "shards"])
def test_loaders_agree_at_any_step(tmp_path: Path, kind: str, repeats: int) -> None:
    dataset = source(kind, tmp_path)
    resident, workers = (loader(dataset, keep, repeats=repeats) for keep in KINDS)
    for step in (0, 1, 2, 3, 7, 8, 2):
        assert same(resident.batch(step), workers.batch(step))
    assert same(loader(dataset, "workers", repeats=repeats).batch(8), workers.batch(8))  # another run, from there on


@pytest.mark.parametrize("keep", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batch(dataset: Dataset, keep: str, world: int) -> None:
    whole = loader(dataset, keep)
    parts = [loader(dataset, keep, rank=rank, world_size=world) for rank in range(world)]
    for step in range(4):
        together = [torch.cat(several) for several in zip(*(part.batch(step) for part in parts), strict=True)]
        assert same(whole.batch(step), LoadedBatch(*together))


@pytest.mark.parametrize("keep", KINDS)
def test_sweep(dataset: Dataset, keep: str) -> None:
    batches = list(loader(dataset, keep).sweep(5))
    assert [len(batch.images) for batch in batches] == [5, 5, 2]
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(12))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), dataset.labels)
    parts = [list(loader(dataset, keep, batch=10, rank=rank, world_size=5).sweep(2)) for rank in range(5)]
    seen = torch.cat([batch.indices for part in parts for batch in part])
    assert seen.sort().values.tolist() == list(range(12))
    with pytest.raises(InvalidOption, match="batch=0"):
        next(loader(dataset, keep).sweep(0))


@pytest.mark.parametrize("keep", KINDS)
def test_a_loader_for_sweeps_alone(dataset: Dataset, keep: str) -> None:
    made = loader(dataset.take(0.1, 0), keep, batch=None)
    assert (made.count, made.steps_per_epoch) == (1, 0)
    assert len(list(made.sweep(64))) == 1
    with pytest.raises(InvalidOption, match="no batch size"):
        made.batch(0)


def test_sweeps_do_not_disturb_steps(dataset: Dataset) -> None:
    made, other = loader(dataset, "workers"), loader(dataset, "device")
    made.batch(0)
    list(made.sweep(4))
    assert same(made.batch(1), other.batch(1))


# ---------------------------------------------------------------- unreadable images


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_replaced_named_and_left_out(damaged: Dataset, workers: int) -> None:
    """2, 3 and 11, the last, cannot be read: 4 replaces the first two, 0 the last."""
    resident = loader(damaged, "device", max_unreadable=0.25, workers=workers)
    streaming = loader(damaged, "workers", max_unreadable=0.25)
    assert streaming.skipped == []  # none was met so far
    for step in range(6):
        assert same(resident.batch(step), streaming.batch(step))
    epoch = torch.cat([resident.batch(step).indices for step in range(3)])
    assert epoch.sort().values.tolist() == [0, 0, 1, 4, 4, 4, 5, 6, 7, 8, 9, 10]
    names = [name for name, _ in resident.skipped]
    assert names == ["a/004.png", "a/006.png", "b/011.png"]
    assert "not an image" in resident.skipped[0][1]
    assert streaming.skipped == resident.skipped
    for made in (resident, streaming):
        seen = torch.cat([batch.indices for batch in made.sweep(5)])
        assert seen.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]


def test_too_many_unreadable_images(damaged: Dataset) -> None:
    with pytest.raises(ImageError, match=r"(?s)2 of 12 images cannot be read.*share of 0.1:\n.*004.png"):
        loader(damaged, "device", max_unreadable=0.1)
    streaming = loader(damaged, "workers", max_unreadable=0.1)
    with pytest.raises(ImageError, match=r"max_unreadable allows a share of 0.1"):
        all(streaming.batch(step) for step in range(3))
    with pytest.raises(InvalidOption, match="max_unreadable=2"):
        loader(damaged, "device", max_unreadable=2)


def test_nothing_readable_at_all(tmp_path: Path) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 4, broken=(0, 1, 2, 3)), labeled=True)
    for keep in KINDS:
        with pytest.raises(ImageError, match="cannot be read"):
            loader(dataset, keep, max_unreadable=1.0).batch(0)


# ---------------------------------------------------------------- where images are kept


def test_kernel_selection(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(loader(dataset, "auto"), InMemoryLoader)
    monkeypatch.setattr(module, "HOST_BYTES", 12 * 3 * 12 * 12 - 1)
    assert isinstance(loader(dataset, "auto"), WorkerLoader)
    assert isinstance(loader(dataset, "device"), InMemoryLoader)


def test_progress(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.loading.memory.CHUNK", 5)
    events: list[tuple[int, int]] = []
    made = loader(dataset, "device", workers=2, progress=lambda *done: events.append(done))
    assert events == [(5, 12), (10, 12), (12, 12)]
    for index, image in enumerate(next(made.sweep(12)).images):
        assert torch.equal(image, dataset.tensor(index, 12))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 13}, "12 samples, fewer than one batch of 13"),
        ({"batch": 5, "world_size": 2}, "batch=5: expected a multiple"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"image_size": 0}, "image_size=0"),
        ({"workers": -1}, "workers=-1"),
        ({"keep": "disk"}, "keep='disk'"),
    ],
)
def test_refusals(dataset: Dataset, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        loader(dataset, **({"keep": "auto"} | given))


# ---------------------------------------------------------------- worker processes


def test_workers_read_the_same_and_their_failure_is_reported(tmp_path: Path) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 12, broken=(4,)), labeled=True)
    made = loader(dataset, "workers", workers=1, max_unreadable=0.1)
    other = loader(dataset, "device", max_unreadable=0.1)
    try:
        for step in (4, 5, 6):
            assert same(made.batch(step), other.batch(step))
        assert made.skipped == other.skipped
        worker: Any = made._batches  # type: ignore[attr-defined]
        os.kill(worker._workers[0].pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="worker ended"):
            all(made.batch(step) for step in range(7, 20))
    finally:
        made.close()


def test_imagenette(shared_data: Path) -> None:
    path = shared_data / "imagenette-128-val.parquet"
    if not path.is_file():
        pytest.skip("needs the Imagenette data set in ../shared/data, which this machine does not have")
    few = open_dataset(path, labeled=True).take(0.02, 0)
    resident, streaming = (
        loader(few, keep, image_size=64, batch=16, workers=count) for keep, count in (("device", 2), ("workers", 0))
    )
    for step in (0, 3, 9):
        assert same(resident.batch(step), streaming.batch(step))
