"""Datasets of other libraries: torch, torchvision, and Hugging Face's."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.files import Pairs, class_folders, encoded, solid_image
from tests.data.test_dataset import numbers
from vitrail.data import open_dataset
from vitrail.errors import ImageError, InvalidOption


def test_torch_data_sets() -> None:
    pairs = Pairs([(solid_image(number), number % 3) for number in range(6)])
    dataset = open_dataset(pairs, labeled=True)
    assert (dataset.classes, dataset.labels[:, 0].tolist()) == ({"label": ("0", "1", "2")}, [0, 1, 2, 0, 1, 2])
    assert numbers(dataset) == list(range(6))
    assert dataset.names[4] == "Pairs, number 4"
    tasks = Pairs([(solid_image(number), (number % 2, torch.tensor(number % 3))) for number in range(6)])
    both = open_dataset(tasks, labels=("even", "third"), labeled=True)
    assert both.labels.tolist() == [[number % 2, number % 3] for number in range(6)]
    named = Pairs([(solid_image(0), 1)])
    named.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    assert open_dataset(named, labeled=True).classes == {"label": ("cat", "dog")}


def test_listed_targets_are_taken_without_reading() -> None:
    pairs = Pairs([ValueError("images are not read for that")] * 3)
    pairs.targets = np.array([1, 0, 1])  # type: ignore[attr-defined]
    dataset = open_dataset(pairs, labeled=True)
    assert dataset.labels[:, 0].tolist() == [1, 0, 1]
    with pytest.raises(ImageError, match=r"Pairs, number 1: could not be read .ValueError"):
        dataset.tensor(1, 8)


@pytest.mark.parametrize(
    "value",
    [
        torch.full((3, 12, 12), 7, dtype=torch.uint8),
        torch.full((1, 12, 12), 7 / 255),
        np.full((12, 12, 3), 7, dtype=np.uint8),
        np.full((12, 12), 7, dtype=np.uint8),
        Image.new("L", (12, 12), 7),
    ],
)
def test_accepted_image_types(value: Any) -> None:
    assert open_dataset(Pairs([(value, 0)]), labeled=True).tensor(0, 12).eq(7).all()


@pytest.mark.parametrize("value", [torch.randn(3, 8, 8), torch.rand(8, 8), "a.png", np.full((8, 8, 3), 7.0), None])
def test_rejected_image_types(value: Any) -> None:
    with pytest.raises(ImageError, match="Pairs, number 0: not an image"):
        open_dataset(Pairs([(value, 0)]), labeled=True).tensor(0, 8)


def test_data_sets_that_cannot_be_used() -> None:
    with pytest.raises(InvalidOption, match="map-style"):
        open_dataset(iter([]), labeled=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="its class is 'cat'"):
        open_dataset(Pairs([(solid_image(0), "cat")]), labeled=True)


def test_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="its data sets are tested")
    class_folders(tmp_path / "set", 4)
    dataset = open_dataset(f"torchvision:ImageFolder:{tmp_path / 'set'}", labeled=True)
    assert (dataset.classes, numbers(dataset)) == ({"label": ("a", "b")}, [0, 2, 1, 3])
    with pytest.raises(ImageError, match=r"torchvision:CIFAR10:.*Download"):
        open_dataset(f"torchvision:CIFAR10:{tmp_path}:test", labeled=True)
    for wrong in ("CIFAR11:x", "CIFAR10", "os:x"):
        with pytest.raises(InvalidOption, match="expected torchvision:NAME:ROOT"):
            open_dataset(f"torchvision:{wrong}", labeled=True)
    with pytest.raises(InvalidOption, match="has the splits train and test; got 'odd'"):
        open_dataset(f"torchvision:CIFAR10:{tmp_path}:odd", labeled=True)
    with pytest.raises(InvalidOption, match="has no splits"):
        open_dataset(f"torchvision:ImageFolder:{tmp_path}:test", labeled=True)


class Table:
    """The part of a Hugging Face dataset that is used."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        self._rows = rows
        self.features = features

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: int | str) -> Any:
        return self._rows[key] if isinstance(key, int) else [row[key] for row in self._rows]

    def select_columns(self, names: list[str]) -> "Table":
        rows = [{name: row[name] for name in names} for row in self._rows]
        return Table(rows, {name: self.features[name] for name in names})

    def cast_column(self, name: str, feature: Any) -> "Table":
        assert feature.decode is False
        return Table(self._rows, self.features | {name: feature})


class Image_:
    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


Image_.__name__ = "Image"
ClassLabel = type("ClassLabel", (), {"names": ["cat", "dog"], "dtype": "int64"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace the datasets library by a fake; return its calls."""
    rows = [
        {"id": number, "img": {"bytes": encoded(number), "path": None}, "kind": number % 2, "word": "xyz"[number % 3]}
        for number in range(4)
    ]
    features = {
        "id": SimpleNamespace(dtype="int64"),
        "img": Image_(),
        "kind": ClassLabel(),
        "word": SimpleNamespace(dtype="string"),
    }
    calls: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> Table:
        calls.append((name, split))
        if name == "no/set":
            raise FileNotFoundError("it is not there")
        return Table(rows, features)

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    return calls


def test_hugging_face(hub: list[tuple[str, str]]) -> None:
    dataset = open_dataset("hf:owner/name:validation", labeled=True)
    assert hub == [("owner/name", "validation")]
    assert dataset.classes == {"label": ("cat", "dog")}
    assert (dataset.labels[:, 0].tolist(), numbers(dataset)) == ([0, 1, 0, 1], [0, 1, 2, 3])
    both = open_dataset("hf:owner/name", labels=("word", "kind"), labeled=True)
    assert hub[-1] == ("owner/name", "train")
    assert both.classes == {"word": ("x", "y", "z"), "kind": ("cat", "dog")}
    assert both.labels.tolist() == [[0, 0], [1, 1], [2, 0], [0, 1]]
    with pytest.raises(InvalidOption, match=r"labels='img'.*id, kind, word"):
        open_dataset("hf:owner/name", labels=("img",), labeled=True)
    with pytest.raises(ImageError, match=r"hf:no/set.*it is not there"):
        open_dataset("hf:no/set", labeled=True)


def test_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidOption, match="pip install datasets"):
        open_dataset("hf:owner/name", labeled=True)
