"""Cached datasets: opened for several runs, decoded once, with the classes of their paths."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.files import class_folders, table
from tests.training.toys import FIELDS, make_photos, same, weights
from vitrail.data import open_dataset
from vitrail.data.loading.loader import Loader, make_loader
from vitrail.data.sources import folder as module
from vitrail.errors import ImageError, InvalidOption
from vitrail.training import evaluate, train


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were decoded, one for each time."""
    found: list[str] = []
    real = module.read_image

    def read_image(path: Path) -> Any:
        found.append(path.name)
        return real(path)

    monkeypatch.setattr(module, "read_image", read_image)
    return found


def resident(dataset: Any, side: int = 12) -> Loader:
    return make_loader(dataset, image_size=side, device="cpu", keep="device", workers=2, max_unreadable=0.5)


def test_cached_samples_are_decoded_once(tmp_path: Path, decoded: list[str]) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 12), labeled=True).cached()
    assert dataset.cached() is dataset
    rest, held = dataset.split(0.25, 0)
    first = next(resident(rest).sweep(20))
    assert len(decoded) == 9
    assert sorted(decoded) == sorted(Path(name).name for name in rest.names)
    second = next(resident(dataset).sweep(20))
    assert sorted(decoded) == sorted(Path(name).name for name in dataset.names)  # the others, and none again
    for feed in (resident(dataset.take(0.5, 3)), resident(held), resident(rest)):
        feed.close()
    assert len(decoded) == 12
    places = torch.tensor([list(dataset.names).index(name) for name in rest.names])
    assert torch.equal(first.images, second.images[places])
    resident(held, side=8)
    assert len(decoded) == 15  # another size


def test_unreadable_samples_are_listed_with_reasons(tmp_path: Path, decoded: list[str]) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 12, broken=(4, 6, 11)), labeled=True).cached()
    first, second = resident(dataset), resident(dataset)
    assert len(decoded) == 12
    assert first.skipped == second.skipped
    assert len(first.skipped) == 3
    with pytest.raises(ImageError, match=r"004\.png"):
        dataset.tensor(2, 12)
    assert torch.equal(next(first.sweep(12)).images, next(second.sweep(12)).images)


def test_nothing_is_cached_by_default_nor_sent_to_workers(tmp_path: Path, decoded: list[str]) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 12), labeled=True)
    feed = resident(dataset)
    feed.close()
    assert feed._images.untyped_storage().nbytes() == 0  # type: ignore[attr-defined]
    resident(dataset)
    assert len(decoded) == 24
    kept = dataset.cached()
    resident(kept)
    assert len(pickle.dumps(kept.bare())) < 12 * 3 * 12 * 12 < len(pickle.dumps(kept))


def test_several_runs_decode_once_and_give_what_paths_give(tmp_path: Path, decoded: list[str]) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    fields = {**FIELDS, "epochs": 1, "validation": 0.25}
    by_path = train(data=str(photos), out=str(tmp_path / "path"), **fields)
    assert len(decoded) == 18
    decoded.clear()
    dataset = open_dataset(photos, labeled=True).cached()
    runs = [train(data=dataset, out=str(tmp_path / f"run{seed}"), seed=seed, **fields) for seed in (0, 1)]
    assert same(weights(runs[0].last), weights(by_path.last))
    assert not same(weights(runs[0].last), weights(runs[1].last))
    rest, held = dataset.split(0.5, 7)
    train(data=rest, out=str(tmp_path / "split"), **{**fields, "validation": held})
    found = evaluate(runs[0].last, dataset, seconds=0, look=0)
    assert len(decoded) == 18
    assert found.loss == evaluate(by_path.last, photos, seconds=0, look=0).loss


# ---------------------------------------------------------------- classes


def test_columns_and_known_classes(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, breed=["x", "y", "z", "y"], kind=[1, 0, 1, None])
    both = open_dataset(path, labels=("breed", "kind"), labeled=True)
    assert both.num_unlabeled == 1
    again = open_dataset(both, labeled=True)
    assert (again.classes, again.labels.tolist(), again.num_unlabeled) == (both.classes, both.labels.tolist(), 1)
    one = open_dataset(both, labels=("kind",), labeled=True)
    assert (one.classes, one.labels[:, 0].tolist()) == ({"kind": ("0", "1")}, [1, 0, 1])
    breeds = open_dataset(path, labels=("breed",), labeled=True)
    known = open_dataset(breeds, classes={"label": ("z", "y", "x")}, labeled=True)  # as a model calls its only question
    assert (known.classes, known.labels[:, 0].tolist()) == ({"label": ("z", "y", "x")}, [2, 1, 0, 1])
    assert known.name(2) == breeds.name(2)
    assert torch.equal(known.tensor(2, 12), breeds.tensor(2, 12))
    assert open_dataset(both, labels=None).labels.shape == (3, 0)
    assert repr(both) == "Dataset(3, breed: 3 classes, kind: 2 classes)"


def test_refusals(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, breed=["x", "y", "z", "y"], kind=[1, 0, 1, 0])
    both = open_dataset(path, labels=("breed", "kind"), labeled=True)
    with pytest.raises(InvalidOption, match=r"labels='colour'.*breed, kind"):
        open_dataset(both, labels=("colour",), labeled=True)
    with pytest.raises(InvalidOption, match="breed: 'z' is not among the 2 known classes"):
        open_dataset(both, classes={"breed": ("x", "y")}, labeled=True)
    with pytest.raises(InvalidOption, match=r"image_size=\(32, 16\): images are made square"):
        train(
            data=both, out=str(tmp_path / "run"), **{**FIELDS, "tasks": "breed", "tokens": None, "image_size": (32, 16)}
        )
