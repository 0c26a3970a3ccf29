"""Examples as data: opened for several runs, decoded once where they are kept, with classes told as of paths."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data import class_folders, table
from tests.training.toys import FIELDS, make_photos, same, weights
from vitrail.data.loading.loader import Feed, make_feed
from vitrail.data.sources import labelled as module
from vitrail.errors import ImageError, InvalidOption
from vitrail.training import evaluate, open_examples, train


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


def resident(examples: Any, side: int = 12) -> Feed:
    return make_feed(examples, side=side, device="cpu", keep="device", workers=2, max_unreadable=0.5)


def test_what_was_asked_for_is_decoded_once(tmp_path: Path, decoded: list[str]) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 12)).kept()
    assert examples.kept() is examples
    rest, held = examples.split(0.25, 0)
    first = next(resident(rest).sweep(20))
    assert len(decoded) == 9
    assert sorted(decoded) == sorted(Path(name).name for name in rest.names)
    second = next(resident(examples).sweep(20))
    assert sorted(decoded) == sorted(Path(name).name for name in examples.names)  # the others, and none again
    for feed in (resident(examples.take(0.5, 3)), resident(held), resident(rest)):
        feed.close()
    assert len(decoded) == 12
    places = torch.tensor([list(examples.names).index(name) for name in rest.names])
    assert torch.equal(first.images, second.images[places])
    resident(held, side=8)
    assert len(decoded) == 15  # another size


def test_what_cannot_be_read_is_remembered_with_its_reason(tmp_path: Path, decoded: list[str]) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 12, broken=(4, 6, 11))).kept()
    first, second = resident(examples), resident(examples)
    assert len(decoded) == 12
    assert first.skipped == second.skipped
    assert len(first.skipped) == 3
    with pytest.raises(ImageError, match=r"004\.png"):
        examples.read(2, 12)
    assert torch.equal(next(first.sweep(12)).images, next(second.sweep(12)).images)


def test_nothing_is_kept_unasked_nor_sent_to_workers(tmp_path: Path, decoded: list[str]) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 12))
    feed = resident(examples)
    feed.close()
    assert feed._images.untyped_storage().nbytes() == 0  # type: ignore[attr-defined]
    resident(examples)
    assert len(decoded) == 24
    kept = examples.kept()
    resident(kept)
    assert len(pickle.dumps(kept.bare())) < 12 * 3 * 12 * 12 < len(pickle.dumps(kept))


def test_several_runs_decode_once_and_give_what_paths_give(tmp_path: Path, decoded: list[str]) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    fields = {**FIELDS, "epochs": 1, "validation": 0.25}
    by_path = train(data=str(photos), out=str(tmp_path / "path"), **fields)
    assert len(decoded) == 18
    decoded.clear()
    examples = open_examples(photos).kept()
    runs = [train(data=examples, out=str(tmp_path / f"run{seed}"), seed=seed, **fields) for seed in (0, 1)]
    assert same(weights(runs[0].last), weights(by_path.last))
    assert not same(weights(runs[0].last), weights(runs[1].last))
    rest, held = examples.split(0.5, 7)
    train(data=rest, out=str(tmp_path / "split"), **{**fields, "validation": held})
    found = evaluate(runs[0].last, examples, seconds=0, look=0)
    assert len(decoded) == 18
    assert found.loss == evaluate(by_path.last, photos, seconds=0, look=0).loss


# ---------------------------------------------------------------- classes


def test_columns_and_known_classes(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, breed=["x", "y", "z", "y"], kind=[1, 0, 1, None])
    both = open_examples(path, labels=("breed", "kind"))
    assert both.unlabelled == 1
    again = open_examples(both)
    assert (again.classes, again.labels.tolist(), again.unlabelled) == (both.classes, both.labels.tolist(), 1)
    one = open_examples(both, labels=("kind",))
    assert (one.classes, one.labels[:, 0].tolist()) == ({"kind": ("0", "1")}, [1, 0, 1])
    breeds = open_examples(path, labels=("breed",))
    known = open_examples(breeds, classes={"label": ("z", "y", "x")})  # as a model calls its only question
    assert (known.classes, known.labels[:, 0].tolist()) == ({"label": ("z", "y", "x")}, [2, 1, 0, 1])
    assert known.name(2) == breeds.name(2)
    assert torch.equal(known.read(2, 12), breeds.read(2, 12))
    assert open_examples(both, labels=None).labels.shape == (3, 0)
    assert repr(both) == "Examples(3, breed: 3 classes, kind: 2 classes)"


def test_refusals(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, breed=["x", "y", "z", "y"], kind=[1, 0, 1, 0])
    both = open_examples(path, labels=("breed", "kind"))
    with pytest.raises(InvalidOption, match=r"labels='colour': these examples were opened with breed, kind\. Open"):
        open_examples(both, labels=("colour",))
    with pytest.raises(InvalidOption, match="breed: 'z' cannot be told among the 2 classes that are known"):
        open_examples(both, classes={"breed": ("x", "y")})
    with pytest.raises(InvalidOption, match=r"image_size=\(32, 16\): pictures are made square"):
        train(
            data=both, out=str(tmp_path / "run"), **{**FIELDS, "tasks": "breed", "tokens": None, "image_size": (32, 16)}
        )
