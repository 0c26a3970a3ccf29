"""Datasets: every source gives the same samples, classes keep their numbers, shares are stratified."""

import importlib
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail.data
from tests.data.files import Pairs, class_folders, encoded, shard, solid_image, table
from tests.data.test_decode import png
from vitrail.data import Arrays, Dataset, InputSpec, Sample, Source, open_dataset, to_tensor
from vitrail.data.decode import center_square
from vitrail.errors import ImageError, InvalidOption, UnsupportedInput
from vitrail.training import open_examples

SPEC = InputSpec((8, 16), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def numbers(dataset: Dataset) -> list[int]:
    """Return the numbers of images, decoded from their colors."""
    return [int(dataset.tensor(index, 12)[0, 0, 0]) for index in range(len(dataset))]


# ---------------------------------------------------------------- one path for all sources


def sources(folder: Path, count: int = 6) -> dict[str, Any]:
    """The same labeled images as every kind of source."""
    classes = [number % 2 for number in range(count)]
    for number in range(count):
        place = folder / "folders" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(encoded(number))
    files = {
        str(number): {"png": encoded(number), "cls": b"ab"[number % 2 : number % 2 + 1]} for number in range(count)
    }
    pairs = Pairs([(solid_image(number), number % 2) for number in range(count)])
    pairs.classes = ["a", "b"]  # type: ignore[attr-defined]
    pixels = torch.stack([center_square(solid_image(number), 12) for number in range(count)])
    names = [f"{number}.png" for number in range(count)]
    return {
        "folders": folder / "folders",
        "glob": str(folder / "folders" / "*" / "*.png"),
        "parquet": table(folder / "set.parquet", count, label=["ab"[one] for one in classes]),
        "shards": shard(folder / "set.tar", files),
        "torch": pairs,
        "arrays": Arrays(pixels, classes, ("a", "b"), names),
        "tensor": pixels,
        "images": [solid_image(number) for number in range(count)],
    }


KINDS = ("folders", "glob", "parquet", "shards", "torch", "arrays", "tensor", "images")


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_images_labels_and_names(tmp_path: Path, kind: str) -> None:
    dataset = open_dataset(sources(tmp_path)[kind])
    order = sorted(range(6), key=lambda number: number % 2) if kind in ("folders", "glob") else list(range(6))
    assert numbers(dataset) == order
    if kind in ("glob", "tensor", "images"):
        assert dataset.classes == {}
    else:
        assert dataset.classes == {"label": ("a", "b")}
        assert dataset.labels[:, 0].tolist() == [number % 2 for number in order]
        assert [dataset[index].label for index in range(6)] == [number % 2 for number in order]
        assert dataset.class_counts == {"label": [3, 3]}
    if kind not in ("torch", "tensor", "images"):  # these have no names of their own
        assert [Path(name).name for name in dataset.names] == [f"{number}.png" for number in order]
    (batch,) = dataset.batches(SPEC, 6)
    assert torch.equal(batch.images, to_tensor([solid_image(number) for number in order], SPEC))
    assert batch.names == dataset.names


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_travels_to_other_processes(tmp_path: Path, kind: str) -> None:
    dataset = open_dataset(sources(tmp_path)[kind])
    before = numbers(dataset)  # a file is open now
    assert numbers(pickle.loads(pickle.dumps(dataset))) == before
    assert numbers(pickle.loads(pickle.dumps(dataset.bare()))) == before


def test_invalid_labels_are_left_out_unless_requested(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 2, label=[5, 1_700_000_000])
    assert open_dataset(path).classes == {}
    for options in ({"labeled": True}, {"labels": "label"}):
        with pytest.raises(InvalidOption, match="number 1700000000"):
            open_dataset(path, **options)  # type: ignore[arg-type]
    captions = Pairs([(solid_image(0), "a cat")])
    assert open_dataset(captions).classes == {}


def test_arrays_that_are_no_images_need_a_model_for_arrays() -> None:
    dataset = open_dataset(torch.randn(3, 2, 4, 6) + 5)
    with pytest.raises(UnsupportedInput, match="not an image"):
        next(dataset.batches(SPEC, 2))
    spec = dataset.statistics()
    assert spec is not None
    (batch,) = dataset.batches(spec, 3)
    assert batch.images.shape == (3, 2, 4, 6)
    assert batch.images.mean().abs() < 1e-5


class Squares(Source):
    """A minimal source."""

    names = ("dark", "light")

    def read(self, row: int) -> Sample:
        if row:
            raise ImageError("light: there is none")
        return Sample(Image.new("RGB", (4, 4)), self.names[row])


def test_a_source_of_the_users_own() -> None:
    dataset = open_dataset(Squares())
    (batch,) = dataset.batches(SPEC, 2)
    assert (batch.names, batch.labels, dataset.skipped) == (("dark",), None, [("light", "light: there is none")])
    with pytest.raises(InvalidOption, match="no label columns"):
        open_dataset(Squares(), labels="kind")


@pytest.mark.parametrize("source", [[], (), {}])
def test_an_empty_source_is_refused(source: Any) -> None:
    with pytest.raises(InvalidOption, match="holds no images; expected an image file"):
        open_dataset(source)


def test_every_path_among_several_holds_images(tmp_path: Path) -> None:
    """Nothing is dropped silently."""
    photo = tmp_path / "photo.png"
    solid_image(1).save(photo)
    for name in ("empty", "tars", "photos"):
        (tmp_path / name).mkdir()
    solid_image(2).save(tmp_path / "photos" / "two.png")
    archive = shard(tmp_path / "tars" / "set.tar", {"0": {"png": encoded(3)}})
    for other, words in (
        (tmp_path / "empty", "empty is a folder without images"),
        (tmp_path / "tars", "tars holds WebDataset shards"),
        (archive, "set.tar holds WebDataset shards"),
    ):
        for given in ([photo, other], [other, photo]):
            with pytest.raises(InvalidOption, match=words):
                open_dataset(given)
    assert len(open_dataset([photo, tmp_path / "photos"])) == 2
    assert len(open_dataset([archive, shard(tmp_path / "more.tar", {"0": {"png": encoded(4)}})])) == 2


def test_former_names_warn_where_they_are_imported() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from vitrail.data import open_collection  # type: ignore[attr-defined]
    assert open_collection is open_dataset
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(compile("from vitrail.data import open_collection", "fresh.py", "exec"), {"__name__": "fresh"})
    assert [(warning.filename, warning.lineno) for warning in caught] == [("fresh.py", 1)]


def test_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="use vitrail.data.Dataset"):
        assert vitrail.data.Collection is Dataset
    with pytest.warns(DeprecationWarning, match="use vitrail.data.open_dataset"):
        assert len(vitrail.data.open_collection()) == 3
    with pytest.warns(DeprecationWarning, match="use vitrail.data.InputSpec"):
        assert vitrail.data.Preprocessing is InputSpec
    sys.modules.pop("vitrail.pictures", None)
    with pytest.warns(DeprecationWarning, match=r"vitrail\.pictures is deprecated"):
        pictures = importlib.import_module("vitrail.pictures")
    with pytest.warns(DeprecationWarning, match=r"use vitrail\.data\.read_image"):
        assert pictures.read_picture is vitrail.data.read_image
    with pytest.warns(DeprecationWarning, match=r"use vitrail\.data\.open_dataset"):
        assert pictures.open_collection is open_dataset
    with pytest.warns(DeprecationWarning, match=r"use Sample\.image"):
        sample = Sample("red", "name").picture
    with pytest.warns(DeprecationWarning, match=r"use Dataset\.cached"):
        kept = open_dataset().kept()
    assert (sample, len(kept)) == ("red", 3)
    with pytest.warns(DeprecationWarning, match="open_dataset"):
        opened = open_examples(Arrays(torch.zeros(3, 1, 2, 2), [0, 1, None]))
    assert (len(opened), opened.num_unlabeled) == (2, 1)


@pytest.mark.parametrize("source", ["", [""], ["photo.jpg", ""]])
def test_an_empty_path_is_refused(source: Any) -> None:
    with pytest.raises(InvalidOption, match="an empty path"):
        open_dataset(source)


@pytest.mark.parametrize("limit", ["x", 0, -1, 2.5, True])
def test_a_limit_is_a_whole_number(limit: Any) -> None:
    with pytest.raises(InvalidOption, match=f"limit={limit!r}: expected a whole number"):
        open_dataset(limit=limit)


def red(value: int) -> Image.Image:
    return Image.new("RGB", (20, 10), (value, 0, 0))


def reds(dataset: Dataset) -> list[int]:
    return [dataset[index].image.getpixel((0, 0))[0] for index in range(len(dataset))]


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    root = tmp_path / "classes"
    for number in range(6):
        folder = root / ("dog" if number % 2 else "cat")
        folder.mkdir(parents=True, exist_ok=True)
        red(number).save(folder / f"{number}.png")
    return root


# ---------------------------------------------------------------- files and folders


def test_samples_by_default() -> None:
    dataset = open_dataset()
    assert dataset.names == ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")
    assert (dataset.classes, dataset.has_masks, dataset.has_boxes) == ({}, False, False)
    assert dataset.class_names is None
    sample = dataset.read(1)
    assert (sample.name, sample.image.size, sample[2:]) == ("chelsea.jpg", (451, 300), (None, None, None, {}))


def test_files_have_short_names_where_these_differ(classes: Path) -> None:
    other = classes.parent / "0.png"
    red(9).save(other)
    dataset = open_dataset([classes / "cat" / "0.png", str(other), classes / "dog" / "1.png"])
    assert dataset.names == (str(classes / "cat" / "0.png"), str(other), "1.png")
    assert reds(dataset) == [0, 9, 1]
    assert not dataset.classes
    assert open_dataset(str(other)).names == ("0.png",)


def test_class_folders_are_labels(classes: Path) -> None:
    dataset = open_dataset(classes)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.names == ("cat/0.png", "cat/2.png", "cat/4.png", "dog/1.png", "dog/3.png", "dog/5.png")
    assert dataset.labels[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.read(3).label == 1


def test_other_directories_are_not_labels(classes: Path) -> None:
    assert not open_dataset(classes.parent).classes  # train/cat, train/dog: `train` is not a class
    assert not open_dataset([classes]).read(0).label  # cat is 0
    assert not open_dataset([classes / "cat", classes / "dog"]).classes
    assert not open_dataset(classes / "cat").classes
    red(9).save(classes / "9.png")
    assert not open_dataset(classes).classes


def test_limit_is_spread_over_all(classes: Path) -> None:
    dataset = open_dataset(classes, limit=2)
    assert (dataset.names, dataset.labels.tolist()) == (("cat/0.png", "dog/1.png"), [[0], [1]])
    assert reds(dataset) == [0, 1]
    assert len(open_dataset(classes, limit=99)) == 6
    with pytest.raises(InvalidOption, match="limit=0: expected a whole number, 1 or more"):
        open_dataset(classes, limit=0)


def test_odd_file_names_can_be_printed(tmp_path: Path) -> None:
    name = b"a\xff\x1b[31m.png".decode("utf-8", "surrogateescape")
    red(3).save(tmp_path / name)
    dataset = open_dataset(tmp_path)
    assert dataset.names[0].isprintable()
    assert dataset.names[0].encode()
    assert reds(dataset) == [3]


# ---------------------------------------------------------------- batches


def test_batches_are_what_the_model_expects(classes: Path) -> None:
    dataset = open_dataset(classes)
    batches = list(dataset.batches(SPEC, 4))
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4, 5)]
    assert batches[0].images.shape == (4, 3, 8, 16)
    assert torch.equal(batches[1].images, to_tensor([dataset[4].image, dataset[5].image], SPEC))
    assert batches[0].names == dataset.names[:4]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    assert batches[0].masks is None
    assert batches[0].boxes is None
    with pytest.raises(InvalidOption, match="batch_size=0"):
        next(dataset.batches(SPEC, 0))


def test_ranks_share_the_samples_and_indices_stay(classes: Path) -> None:
    dataset = open_dataset(classes)
    parts = [[batch.indices for batch in dataset.batches(SPEC, 1, rank=rank, world_size=4)] for rank in range(4)]
    assert parts == [[(0,), (4,)], [(1,), (5,)], [(2,)], [(3,)]]
    assert [batch.indices for batch in dataset.batches(SPEC, 2, indices=[5, 1, 2])] == [(5, 1), (2,)]
    assert list(dataset.batches(SPEC, 1, rank=6, world_size=7)) == []  # nothing left for it, and no error
    for rank, world_size in ((-1, 2), (2, 2)):
        with pytest.raises(InvalidOption, match="rank="):
            next(dataset.batches(SPEC, 1, rank=rank, world_size=world_size))


def test_another_size_than_the_model_expects(classes: Path) -> None:
    assert next(open_dataset(classes, size=(4, 6)).batches(SPEC, 2)).images.shape == (2, 3, 4, 6)


def test_broken_images_are_skipped_counted_once_and_named(classes: Path) -> None:
    (classes / "cat" / "2.png").write_text("no image")
    (classes / "dog" / "5.png").write_bytes(png(11_000, 11_000))
    dataset = open_dataset(classes)
    skipped: list[tuple[str, str]] = []
    for _ in range(2):
        batches = list(dataset.batches(SPEC, 3, on_skip=lambda *skip: skipped.append(skip)))
        assert [batch.indices for batch in batches] == [(0, 2, 3), (4,)]
    assert [name for name, _ in dataset.skipped] == ["cat/2.png", "dog/5.png"]
    assert "not an image" in dataset.skipped[0][1]
    assert "121 megapixels" in dataset.skipped[1][1]
    assert skipped == dataset.skipped * 2


def test_none_readable_is_an_error_unless_there_are_other_ranks(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    dataset = open_dataset(tmp_path)
    with pytest.raises(ImageError, match=r"none of the 2 images.*a\.png.*empty"):
        list(dataset.batches(SPEC, 2))
    assert list(dataset.batches(SPEC, 2, rank=0, world_size=2)) == []
    with pytest.raises(ImageError, match="no such file"):
        open_dataset(tmp_path / "missing.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="no images found"):
        open_dataset(tmp_path / "empty")


# ---------------------------------------------------------------- labels


def test_class_folders(tmp_path: Path) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 6), labeled=True)
    assert dataset.classes == {"label": ("a", "b")}
    assert dataset.labels.tolist() == [[0], [0], [0], [1], [1], [1]]
    assert dataset.labels.dtype == torch.int64
    assert numbers(dataset) == [0, 2, 4, 1, 3, 5]
    assert list(dataset.names) == ["a/000.png", "a/002.png", "a/004.png", "b/001.png", "b/003.png", "b/005.png"]
    assert len(dataset) == 6


def test_directories_without_classes(tmp_path: Path) -> None:
    class_folders(tmp_path / "set" / "train", 4)
    with pytest.raises(ImageError, match=r"none of the 4 samples has a label.*PATH/train"):
        open_dataset(tmp_path / "set", labeled=True)
    with pytest.raises(InvalidOption, match="labels='breed' names a column"):
        open_dataset(tmp_path / "set" / "train", labels=["breed"], labeled=True)
    unlabelled = open_dataset(tmp_path / "set", labels=None)
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
    dataset = open_dataset(path, labels=("species", "breed"), labeled=True)
    assert dataset.classes == {"species": ("y", "z"), "breed": ("cat", "dog", "pug")}
    assert dataset.labels.tolist() == [[1, 2], [0, 0], [1, 1], [1, 2], [0, 0], [1, 1]]
    assert numbers(dataset) == list(range(6))
    assert open_dataset([path], labeled=True).classes == {
        "label": ("cat", "dog", "pug")
    }  # the first column of whole numbers
    with pytest.raises(InvalidOption, match=r"labels='colour'.*'breed'"):
        open_dataset(path, labels=("breed", "colour"), labeled=True)
    with pytest.raises(InvalidOption, match="a column is named twice"):
        open_dataset(path, labels=("breed", "breed"), labeled=True)


def test_images_without_a_class_are_left_out_and_counted(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 5, label=[0, None, 1, -1, 2], other=[0, 0, None, 0, 0])
    dataset = open_dataset(path, labeled=True)
    assert (numbers(dataset), dataset.num_unlabeled) == ([0, 2, 4], 2)
    assert dataset.labels.tolist() == [[0], [1], [2]]
    both = open_dataset(path, labels=("label", "other"), labeled=True)
    assert (numbers(both), both.num_unlabeled, both.labels.tolist()) == ([0, 4], 3, [[0, 0], [2, 0]])
    held = table(tmp_path / "test.parquet", 3, label=[-1, -1, -1])
    with pytest.raises(ImageError, match="none of the 3 samples has a label"):
        open_dataset(held, labeled=True)


def test_names_of_nameless_classes(tmp_path: Path) -> None:
    assert open_dataset(table(tmp_path / "set.parquet", 2, label=[0, 2]), labeled=True).classes == {
        "label": ("0", "1", "2")
    }


# ---------------------------------------------------------------- classes that are known


def test_known_classes_keep_their_numbers(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "val", 4, classes="bd")
    known = {"label": ("a", "d", "b")}
    dataset = open_dataset(root, classes=known, labeled=True)
    assert dataset.classes == known
    assert dataset.labels[:, 0].tolist() == [2, 2, 1, 1]  # b, b, d, d
    with pytest.raises(InvalidOption, match="label: 'd' is not among the 2 known classes"):
        open_dataset(root, classes={"label": ("a", "b")}, labeled=True)
    with pytest.raises(InvalidOption, match="label: 'b', 'd' are not among the 2 known classes"):
        open_dataset(root, classes={"label": ("x", "y")}, labeled=True)


def test_known_classes_of_numbers(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 4, label=[0, 1, 1, 0])
    assert open_dataset(path, classes={"label": ("0", "1")}, labeled=True).classes == {"label": ("0", "1")}
    with pytest.raises(InvalidOption, match="number 1, and 1 classes are known"):
        open_dataset(path, classes={"label": ("0",)}, labeled=True)
    with pytest.raises(InvalidOption, match="numbers without names"):
        open_dataset(path, classes={"label": ("cat", "dog")}, labeled=True)


def test_known_classes_of_data_without_labels(tmp_path: Path) -> None:
    solid_image(3).save(tmp_path / "one.png")
    with pytest.raises(ImageError, match=r"none of the 1 sample has a label \(label\).*PATH/val .* a label column$"):
        open_dataset(tmp_path, classes={"label": ("cat", "dog")}, labeled=True)


def test_known_classes_select_the_columns(tmp_path: Path) -> None:
    path = table(tmp_path / "set.parquet", 2, breed=[0, 1], species=["y", "z"])
    known = {"species": ("z", "y"), "breed": ("0", "1")}
    dataset = open_dataset(path, classes=known, labeled=True)
    assert dataset.classes == known
    assert dataset.labels.tolist() == [[1, 0], [0, 1]]
    assert open_dataset(path, labels=("breed", "species"), classes=known, labeled=True).labels.tolist() == [
        [1, 0],
        [0, 1],
    ]
    with pytest.raises(InvalidOption, match="labels=breed: the known classes"):
        open_dataset(path, labels=("breed",), classes=known, labeled=True)


# ---------------------------------------------------------------- reading


def test_square_takes_the_middle() -> None:
    image = solid_image(0, (40, 20))
    made = center_square(image, 20)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 20, 20), torch.uint8, True)
    assert made[1, 0].tolist() == [3 * column for column in range(10, 30)]
    assert torch.equal(center_square(image.transpose(Image.Transpose.ROTATE_90), 20)[1, :, 0], made[1, 0].flip(0))


@pytest.mark.parametrize("size", [(30, 60), (60, 30)])
def test_square_is_the_middle_of_the_resized_image(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.randint(0, 256, (*size, 3), dtype=np.uint8))
    whole = image.resize((image.width * 16 // 30, image.height * 16 // 30), Image.Resampling.BICUBIC)
    left, top = (whole.width - 16) // 2, (whole.height - 16) // 2
    expected = np.asarray(whole.crop((left, top, left + 16, top + 16))).astype(int)
    assert abs(center_square(image, 16).permute(1, 2, 0).numpy() - expected).max() <= 2  # either axis is rounded first


# ---------------------------------------------------------------- shares


def test_split_is_fair_and_deterministic(tmp_path: Path) -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    path = table(tmp_path / "set.parquet", 100, label=labels)
    dataset = open_dataset(path, labeled=True)
    rest, held = dataset.split(0.2, seed=1)
    assert held.labels[:, 0].bincount().tolist() == [12, 6, 2]
    assert rest.labels[:, 0].bincount().tolist() == [48, 24, 8]
    assert sorted(numbers(rest) + numbers(held)) == list(range(100))
    assert rest.classes == held.classes == dataset.classes
    assert numbers(dataset.split(0.2, seed=1)[1]) == numbers(held)
    assert numbers(dataset.split(0.2, seed=2)[1]) != numbers(held)
    assert numbers(held) == sorted(numbers(held))  # in the order of the file, which is quickest to read
    assert rest.labels[5].item() == labels[numbers(rest)[5]]


def test_take(tmp_path: Path) -> None:
    dataset = open_dataset(class_folders(tmp_path / "set", 20), labeled=True)
    few = dataset.take(0.3, seed=0)
    assert few.labels[:, 0].bincount().tolist() == [3, 3]
    assert dataset.take(1.0, seed=0) is dataset
    assert len(dataset.take(0.001, seed=0)) == 1
    for share in (0.0, 1.5):
        with pytest.raises(InvalidOption, match="expected a number above 0"):
            dataset.take(share, 0)
    for share in (0.0, 1.0, 0.01):
        with pytest.raises(InvalidOption, match=r"above 0, below 1|cannot be held out"):
            dataset.split(share, 0)


# ---------------------------------------------------------------- real data


def test_pets(shared_data: Path) -> None:
    path = shared_data / "pets-160-test.parquet"
    if not path.is_file():
        pytest.skip("needs the Pets data set in ../shared/data, which this machine does not have")
    dataset = open_dataset(path, labels=("breed", "species"), labeled=True)
    assert len(dataset) == 3669
    assert [len(names) for names in dataset.classes.values()] == [37, 2]
    assert dataset.labels.amax(0).tolist() == [36, 1]
    _, held = dataset.split(0.1, 0)
    counts = held.labels[:, 0].bincount(minlength=37)
    assert (counts - 0.1 * dataset.labels[:, 0].bincount()).abs().max() <= 1
    assert held.tensor(0, 64).float().std() > 10


def test_names_of_known_classes_may_differ_in_case_blanks_and_underscores(tmp_path: Path) -> None:
    for name in ("English_springer", "chain  SAW"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a.png")
    known = {"label": ("other", "english springer", "Chain_Saw")}
    dataset = open_dataset(tmp_path, classes=known, labeled=True)
    assert {name.split("/")[0]: int(label) for name, label in zip(dataset.names, dataset.labels, strict=True)} == {
        "English_springer": 1,
        "chain  SAW": 2,
    }
    several = {"label": ("english springer", "English_springer", "chain saw")}
    exact = open_dataset(tmp_path, classes=several, labeled=True)
    assert sorted(exact.labels[:, 0].tolist()) == [1, 2]
    with pytest.raises(InvalidOption, match="not among the 3 known classes"):  # two known ones are spelled alike
        open_dataset(tmp_path, classes={"label": ("ENGLISH springer", "English springer", "chain saw")}, labeled=True)


def test_an_unlabeled_folder_and_a_file_of_text_are_named_as_such(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ImageError, match="is an unlabeled folder"):
        open_dataset(tmp_path, labeled=True)
    (tmp_path / "labels.json").write_text("{}")
    with pytest.raises(ImageError, match="is a file of text"):
        open_dataset(tmp_path / "labels.json")
    assert len(open_dataset(tmp_path)) == 1  # in a folder it is left out
