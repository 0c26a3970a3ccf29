"""Examples: every source gives the same kind of them, classes keep their numbers, and shares are fair."""

import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vitrail.data.decoded import square

from tests.training.data import Pairs, class_folders, encoded, picture, shard, table
from vitrail.data.dataset import Examples, open_examples
from vitrail.errors import ImageError, InvalidOption


def numbers(examples: Examples) -> list[int]:
    """Which pictures they are, by their colour."""
    return [int(examples.read(index, 12)[0, 0, 0]) for index in range(len(examples))]


# ---------------------------------------------------------------- folders and parquet files


def test_class_folders(tmp_path: Path) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 6))
    assert examples.classes == {"label": ("a", "b")}
    assert examples.labels.tolist() == [[0], [0], [0], [1], [1], [1]]
    assert examples.labels.dtype == torch.int64
    assert numbers(examples) == [0, 2, 4, 1, 3, 5]
    assert list(examples.names) == ["a/000.png", "a/002.png", "a/004.png", "b/001.png", "b/003.png", "b/005.png"]
    assert len(examples) == 6


def test_folders_without_classes(tmp_path: Path) -> None:
    class_folders(tmp_path / "set" / "train", 4)
    with pytest.raises(ImageError, match=r"None of the 4 pictures has a class.*name PATH/train"):
        open_examples(tmp_path / "set")
    with pytest.raises(InvalidOption, match="labels='breed' names a column, and these are picture files"):
        open_examples(tmp_path / "set" / "train", labels=["breed"])
    unlabelled = open_examples(tmp_path / "set", labels=None)
    assert (len(unlabelled), unlabelled.classes, unlabelled.labels.shape) == (4, {}, (4, 0))
    assert len(unlabelled.take(0.5, 0)) == 2


def test_parquet_with_several_columns(tmp_path: Path) -> None:
    path = table(
        tmp_path / "set.parquet",
        6,
        breed=[2, 0, 1, 2, 0, 1],
        breed_name=["pug", "cat", "dog", "pug", "cat", "dog"],
        species=["z", "y", "z", "z", "y", "z"],
    )
    examples = open_examples(path, labels=("species", "breed"))
    assert examples.classes == {"species": ("y", "z"), "breed": ("cat", "dog", "pug")}
    assert examples.labels.tolist() == [[1, 2], [0, 0], [1, 1], [1, 2], [0, 0], [1, 1]]
    assert numbers(examples) == list(range(6))
    assert open_examples([path]).classes == {"label": ("cat", "dog", "pug")}  # the first column of whole numbers
    with pytest.raises(InvalidOption, match=r"labels='colour'.*no such column.*'breed'"):
        open_examples(path, labels=("breed", "colour"))
    with pytest.raises(InvalidOption, match="a column is named twice"):
        open_examples(path, labels=("breed", "breed"))


def test_pictures_without_a_class_are_left_out_and_counted(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 5, label=[0, None, 1, -1, 2], other=[0, 0, None, 0, 0])
    examples = open_examples(path)
    assert (numbers(examples), examples.unlabelled) == ([0, 2, 4], 2)
    assert examples.labels.tolist() == [[0], [1], [2]]
    both = open_examples(path, labels=("label", "other"))
    assert (numbers(both), both.unlabelled, both.labels.tolist()) == ([0, 4], 3, [[0, 0], [2, 0]])
    held = table(tmp_path / "test.parquet", 3, label=[-1, -1, -1])
    with pytest.raises(ImageError, match="None of the 3 pictures has a class"):
        open_examples(held)


def test_numbers_that_count_no_classes(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="a class has the number 1700000000"):
        open_examples(table(tmp_path / "set.parquet", 2, label=[5, 1_700_000_000]))


def test_names_of_nameless_classes(tmp_path: Path) -> None:
    assert open_examples(table(tmp_path / "set.parquet", 2, label=[0, 2])).classes == {"label": ("0", "1", "2")}


# ---------------------------------------------------------------- classes that are known


def test_known_classes_keep_their_numbers(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "val", 4, classes="bd")
    known = {"label": ("a", "d", "b")}
    examples = open_examples(root, classes=known)
    assert examples.classes == known
    assert examples.labels[:, 0].tolist() == [2, 2, 1, 1]  # b, b, d, d
    with pytest.raises(InvalidOption, match="label: 'd' cannot be told among the 2 classes that are known"):
        open_examples(root, classes={"label": ("a", "b")})


def test_known_classes_of_numbers(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, label=[0, 1, 1, 0])
    assert open_examples(path, classes={"label": ("0", "1")}).classes == {"label": ("0", "1")}
    with pytest.raises(InvalidOption, match="a class has the number 1; known are 1 classes"):
        open_examples(path, classes={"label": ("0",)})
    with pytest.raises(InvalidOption, match="numbers without names, and those that are known have names"):
        open_examples(path, classes={"label": ("cat", "dog")})


def test_known_classes_say_which_columns(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 2, breed=[0, 1], species=["y", "z"])
    known = {"species": ("z", "y"), "breed": ("0", "1")}
    examples = open_examples(path, classes=known)
    assert examples.classes == known
    assert examples.labels.tolist() == [[1, 0], [0, 1]]
    assert open_examples(path, labels=("breed", "species"), classes=known).labels.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(InvalidOption, match="labels=breed: the classes that are known are of species,breed"):
        open_examples(path, labels=("breed",), classes=known)


# ---------------------------------------------------------------- reading


def test_square_takes_the_middle() -> None:
    image = picture(0, (40, 20))
    made = square(image, 20)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 20, 20), torch.uint8, True)
    assert made[1, 0].tolist() == [3 * column for column in range(10, 30)]
    assert torch.equal(square(image.transpose(Image.Transpose.ROTATE_90), 20)[1, :, 0], made[1, 0].flip(0))


@pytest.mark.parametrize("size", [(30, 60), (60, 30)])
def test_square_is_the_middle_of_the_resized_picture(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.randint(0, 256, (*size, 3), dtype=np.uint8))
    whole = image.resize((image.width * 16 // 30, image.height * 16 // 30), Image.Resampling.BICUBIC)
    left, top = (whole.width - 16) // 2, (whole.height - 16) // 2
    expected = np.asarray(whole.crop((left, top, left + 16, top + 16))).astype(int)
    assert abs(square(image, 16).permute(1, 2, 0).numpy() - expected).max() <= 2  # either axis is rounded first


# ---------------------------------------------------------------- shares


def test_split_is_fair_and_deterministic(tmp_path: Path) -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    path = table(tmp_path / "set.parquet", 100, label=labels)
    examples = open_examples(path)
    rest, held = examples.split(0.2, seed=1)
    assert held.labels[:, 0].bincount().tolist() == [12, 6, 2]
    assert rest.labels[:, 0].bincount().tolist() == [48, 24, 8]
    assert sorted(numbers(rest) + numbers(held)) == list(range(100))
    assert rest.classes == held.classes == examples.classes
    assert numbers(examples.split(0.2, seed=1)[1]) == numbers(held)
    assert numbers(examples.split(0.2, seed=2)[1]) != numbers(held)
    assert numbers(held) == sorted(numbers(held))  # in the order of the file, which is quickest to read
    assert rest.labels[5].item() == labels[numbers(rest)[5]]


def test_take(tmp_path: Path) -> None:
    examples = open_examples(class_folders(tmp_path / "set", 20))
    few = examples.take(0.3, seed=0)
    assert few.labels[:, 0].bincount().tolist() == [3, 3]
    assert examples.take(1.0, seed=0) is examples
    assert len(examples.take(0.001, seed=0)) == 1
    for share in (0.0, 1.5):
        with pytest.raises(InvalidOption, match="expected a number above 0"):
            examples.take(share, 0)
    for share in (0.0, 1.0, 0.01):
        with pytest.raises(InvalidOption, match="cannot be held out"):
            examples.split(share, 0)


@pytest.mark.parametrize("kind", ["folders", "parquet", "shards"])
def test_examples_travel_to_other_processes(tmp_path: Path, kind: str) -> None:
    if kind == "folders":
        examples = open_examples(class_folders(tmp_path / "set", 4))
    elif kind == "parquet":
        examples = open_examples(table(tmp_path / "set.parquet", 4, label=[0, 1, 0, 1]))
    else:
        files = {str(number): {"png": encoded(number), "cls": 0} for number in range(4)}
        examples = open_examples(shard(tmp_path / "set.tar", files))
    before = numbers(examples)  # a file is open now
    assert numbers(pickle.loads(pickle.dumps(examples))) == before
    assert numbers(pickle.loads(pickle.dumps(examples.bare()))) == before


# ---------------------------------------------------------------- data sets of other libraries


def test_torch_data_sets() -> None:
    pairs = Pairs([(picture(number), number % 3) for number in range(6)])
    examples = open_examples(pairs)
    assert (examples.classes, examples.labels[:, 0].tolist()) == ({"label": ("0", "1", "2")}, [0, 1, 2, 0, 1, 2])
    assert numbers(examples) == list(range(6))
    assert examples.names[4] == "Pairs, number 4"
    tasks = Pairs([(picture(number), (number % 2, torch.tensor(number % 3))) for number in range(6)])
    both = open_examples(tasks, labels=("even", "third"))
    assert both.labels.tolist() == [[number % 2, number % 3] for number in range(6)]
    named = Pairs([(picture(0), 1)])
    named.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    assert open_examples(named).classes == {"label": ("cat", "dog")}


def test_listed_targets_are_taken_without_reading() -> None:
    pairs = Pairs([ValueError("pictures are not read for that")] * 3)
    pairs.targets = np.array([1, 0, 1])  # type: ignore[attr-defined]
    examples = open_examples(pairs)
    assert examples.labels[:, 0].tolist() == [1, 0, 1]
    with pytest.raises(ImageError, match=r"Pairs, number 1: it could not be read .ValueError: pictures are"):
        examples.read(1, 8)


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
def test_whatever_is_a_picture(value: Any) -> None:
    assert open_examples(Pairs([(value, 0)])).read(0, 12).eq(7).all()


@pytest.mark.parametrize("value", [torch.randn(3, 8, 8), torch.rand(8, 8), "a.png", np.zeros((8, 8, 3)), None])
def test_whatever_is_none(value: Any) -> None:
    with pytest.raises(ImageError, match="Pairs, number 0: this is not a picture"):
        open_examples(Pairs([(value, 0)])).read(0, 8)


def test_data_sets_that_cannot_be_used() -> None:
    with pytest.raises(InvalidOption, match="a stream has no order"):
        open_examples(iter([]))  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"its class is 'cat'. Expected a whole number"):
        open_examples(Pairs([(picture(0), "cat")]))


def test_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="its data sets are tested")
    class_folders(tmp_path / "set", 4)
    examples = open_examples(f"torchvision:ImageFolder:{tmp_path / 'set'}")
    assert (examples.classes, numbers(examples)) == ({"label": ("a", "b")}, [0, 2, 1, 3])
    with pytest.raises(ImageError, match=r"torchvision:CIFAR10:.*Download it first"):
        open_examples(f"torchvision:CIFAR10:{tmp_path}:test")
    for wrong in ("CIFAR11:x", "CIFAR10", "os:x"):
        with pytest.raises(InvalidOption, match="expected torchvision:NAME:ROOT"):
            open_examples(f"torchvision:{wrong}")
    with pytest.raises(InvalidOption, match="has the splits train and test; got 'odd'"):
        open_examples(f"torchvision:CIFAR10:{tmp_path}:odd")
    with pytest.raises(InvalidOption, match="has no splits"):
        open_examples(f"torchvision:ImageFolder:{tmp_path}:test")


class Table:
    """As much of a data set of Hugging Face's as is used."""

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
    """A stand-in for the datasets library; what was asked for."""
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
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> Table:
        asked.append((name, split))
        if name == "no/set":
            raise FileNotFoundError("it is not there")
        return Table(rows, features)

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    return asked


def test_hugging_face(hub: list[tuple[str, str]]) -> None:
    examples = open_examples("hf:owner/name:validation")
    assert hub == [("owner/name", "validation")]
    assert examples.classes == {"label": ("cat", "dog")}
    assert (examples.labels[:, 0].tolist(), numbers(examples)) == ([0, 1, 0, 1], [0, 1, 2, 3])
    both = open_examples("hf:owner/name", labels=("word", "kind"))
    assert hub[-1] == ("owner/name", "train")
    assert both.classes == {"word": ("x", "y", "z"), "kind": ("cat", "dog")}
    assert both.labels.tolist() == [[0, 0], [1, 1], [2, 0], [0, 1]]
    with pytest.raises(InvalidOption, match=r"labels='img': no such column of classes. Expected one of id, kind, word"):
        open_examples("hf:owner/name", labels=("img",))
    with pytest.raises(ImageError, match=r"hf:no/set: the data set could not be opened .it is not there"):
        open_examples("hf:no/set")


def test_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidOption, match="needs the datasets library: pip install datasets"):
        open_examples("hf:owner/name")


# ---------------------------------------------------------------- real data


def test_pets(shared_data: Path) -> None:
    path = shared_data / "pets-160-test.parquet"
    if not path.is_file():
        pytest.skip("needs the Pets data set in ../shared/data, which this machine does not have")
    examples = open_examples(path, labels=("breed", "species"))
    assert len(examples) == 3669
    assert [len(names) for names in examples.classes.values()] == [37, 2]
    assert examples.labels.amax(0).tolist() == [36, 1]
    _, held = examples.split(0.1, 0)
    counts = held.labels[:, 0].bincount(minlength=37)
    assert (counts - 0.1 * examples.labels[:, 0].bincount()).abs().max() <= 1
    assert held.read(0, 64).float().std() > 10
