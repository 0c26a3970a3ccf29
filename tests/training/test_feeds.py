"""Feeds: the same batches wherever pictures are kept, for any number of processes, from any step on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data import class_folders, encoded, shard, table
from vitrail.data.dataset import Examples, open_examples
from vitrail.data.loading import loader as feeds
from vitrail.data.loading.loader import Batch, Feed, make_feed
from vitrail.data.loading.memory import ResidentFeed
from vitrail.data.loading.workers import WorkerFeed
from vitrail.errors import ImageError, InvalidOption, TrainingError

KINDS = ["device", "workers"]


def feed(examples: Examples, keep: Any, **more: Any) -> Feed:
    return make_feed(
        examples, **{"side": 12, "batch": 4, "seed": 3, "device": "cpu", "keep": keep, "workers": 0} | more
    )


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return open_examples(class_folders(tmp_path / "set", 12))


@pytest.fixture
def damaged(tmp_path: Path) -> Examples:
    """By index: 0 1 2 3 4 5 are pictures 0 2 4 6 8 10, and 6 to 11 are 1 3 5 7 9 11."""
    return open_examples(class_folders(tmp_path / "damaged", 12, broken=(4, 6, 11)))


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("keep", KINDS)
def test_batches_hold_what_the_order_says(examples: Examples, keep: str) -> None:
    made = feed(examples, keep)
    assert (made.count, made.steps_per_epoch, made.side) == (12, 3, 12)
    assert made.classes == {"label": ("a", "b")}
    batch = made.batch(0)
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 12, 12), torch.uint8)
    for image, label, index in zip(*batch, strict=True):
        assert torch.equal(image, examples.read(int(index), 12))
        assert torch.equal(label, examples.labels[index])
    epoch = torch.cat([made.batch(step).indices for step in range(3)])
    assert epoch.sort().values.tolist() == list(range(12))
    assert made.skipped == []
    made.close()


def source(kind: str, folder: Path) -> Examples:
    if kind == "folders":
        return open_examples(class_folders(folder / "set", 12))
    if kind == "parquet":
        return open_examples(table(folder / "set.parquet", 12, label=[0, 1] * 6))
    files = {str(number): {"png": encoded(number), "cls": number % 2} for number in range(12)}
    return open_examples(shard(folder / "set.tar", files))


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("kind", ["folders", "parquet", "shards"])
def test_feeds_agree_at_any_step(tmp_path: Path, kind: str, repeats: int) -> None:
    examples = source(kind, tmp_path)
    resident, workers = (feed(examples, keep, repeats=repeats) for keep in KINDS)
    for step in (0, 1, 2, 3, 7, 8, 2):
        assert same(resident.batch(step), workers.batch(step))
    assert same(feed(examples, "workers", repeats=repeats).batch(8), workers.batch(8))  # another run, from there on


@pytest.mark.parametrize("keep", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batch(examples: Examples, keep: str, world: int) -> None:
    whole = feed(examples, keep)
    parts = [feed(examples, keep, rank=rank, world=world) for rank in range(world)]
    for step in range(4):
        together = [torch.cat(several) for several in zip(*(part.batch(step) for part in parts), strict=True)]
        assert same(whole.batch(step), Batch(*together))


@pytest.mark.parametrize("keep", KINDS)
def test_sweep(examples: Examples, keep: str) -> None:
    batches = list(feed(examples, keep).sweep(5))
    assert [len(batch.images) for batch in batches] == [5, 5, 2]
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(12))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), examples.labels)
    parts = [list(feed(examples, keep, batch=10, rank=rank, world=5).sweep(2)) for rank in range(5)]
    seen = torch.cat([batch.indices for part in parts for batch in part])
    assert seen.sort().values.tolist() == list(range(12))
    with pytest.raises(InvalidOption, match="batch=0"):
        next(feed(examples, keep).sweep(0))


@pytest.mark.parametrize("keep", KINDS)
def test_a_feed_for_sweeps_alone(examples: Examples, keep: str) -> None:
    made = feed(examples.take(0.1, 0), keep, batch=None)
    assert (made.count, made.steps_per_epoch) == (1, 0)
    assert len(list(made.sweep(64))) == 1
    with pytest.raises(InvalidOption, match="made for sweeps alone"):
        made.batch(0)


def test_sweeps_do_not_disturb_steps(examples: Examples) -> None:
    made, other = feed(examples, "workers"), feed(examples, "device")
    made.batch(0)
    list(made.sweep(4))
    assert same(made.batch(1), other.batch(1))


# ---------------------------------------------------------------- unreadable pictures


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_pictures_are_replaced_named_and_left_out(damaged: Examples, workers: int) -> None:
    """2 and 3 cannot be read, nor 11, the last: 4 stands for the first two, 0 for the last."""
    resident = feed(damaged, "device", max_unreadable=0.25, workers=workers)
    streaming = feed(damaged, "workers", max_unreadable=0.25)
    assert streaming.skipped == []  # none was met so far
    for step in range(6):
        assert same(resident.batch(step), streaming.batch(step))
    epoch = torch.cat([resident.batch(step).indices for step in range(3)])
    assert epoch.sort().values.tolist() == [0, 0, 1, 4, 4, 4, 5, 6, 7, 8, 9, 10]
    names = [name for name, _ in resident.skipped]
    assert names == ["a/004.png", "a/006.png", "b/011.png"]
    assert "this is not a picture" in resident.skipped[0][1]
    assert streaming.skipped == resident.skipped
    for made in (resident, streaming):
        seen = torch.cat([batch.indices for batch in made.sweep(5)])
        assert seen.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]


def test_too_many_unreadable_pictures(damaged: Examples) -> None:
    with pytest.raises(ImageError, match=r"(?s)2 of 12 pictures cannot be read.*share of 0.1:\n.*004.png"):
        feed(damaged, "device", max_unreadable=0.1)
    streaming = feed(damaged, "workers", max_unreadable=0.1)
    with pytest.raises(ImageError, match=r"max_unreadable allows a share of 0.1"):
        all(streaming.batch(step) for step in range(3))
    with pytest.raises(InvalidOption, match="max_unreadable=2"):
        feed(damaged, "device", max_unreadable=2)


def test_nothing_readable_at_all(tmp_path: Path) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 4, broken=(0, 1, 2, 3)))
    for keep in KINDS:
        with pytest.raises(ImageError, match="cannot be read"):
            feed(examples, keep, max_unreadable=1.0).batch(0)


# ---------------------------------------------------------------- where pictures are kept


def test_the_choice(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(feed(examples, "auto"), ResidentFeed)
    monkeypatch.setattr(feeds, "HOST_BYTES", 12 * 3 * 12 * 12 - 1)
    assert isinstance(feed(examples, "auto"), WorkerFeed)
    assert isinstance(feed(examples, "device"), ResidentFeed)


def test_progress(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.loading.memory.AT_ONCE", 5)
    told: list[tuple[int, int]] = []
    made = feed(examples, "device", workers=2, progress=lambda *done: told.append(done))
    assert told == [(5, 12), (10, 12), (12, 12)]
    for index, image in enumerate(next(made.sweep(12)).images):
        assert torch.equal(image, examples.read(index, 12))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 13}, "There are 12 examples, fewer than one batch of 13"),
        ({"batch": 5, "world": 2}, "batch=5 cannot be shared out evenly among 2 processes"),
        ({"rank": 2, "world": 2}, "rank=2, world=2"),
        ({"side": 0}, "side=0"),
        ({"workers": -1}, "workers=-1"),
        ({"keep": "disk"}, "keep='disk'"),
    ],
)
def test_refusals(examples: Examples, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        feed(examples, **({"keep": "auto"} | given))


# ---------------------------------------------------------------- processes that read


def test_workers_read_the_same_and_their_death_is_told(tmp_path: Path) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 12, broken=(4,)))
    made = feed(examples, "workers", workers=1, max_unreadable=0.1)
    other = feed(examples, "device", max_unreadable=0.1)
    try:
        for step in (4, 5, 6):
            assert same(made.batch(step), other.batch(step))
        assert made.skipped == other.skipped
        loader: Any = made._batches  # type: ignore[attr-defined]
        os.kill(loader._workers[0].pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="A process that reads pictures ended"):
            all(made.batch(step) for step in range(7, 20))
    finally:
        made.close()


def test_imagenette(shared_data: Path) -> None:
    path = shared_data / "imagenette-128-val.parquet"
    if not path.is_file():
        pytest.skip("needs the Imagenette data set in ../shared/data, which this machine does not have")
    few = open_examples(path).take(0.02, 0)
    resident, streaming = (
        feed(few, keep, side=64, batch=16, workers=count) for keep, count in (("device", 2), ("workers", 0))
    )
    for step in (0, 3, 9):
        assert same(resident.batch(step), streaming.batch(step))
