"""Label files: columns of classes, values and several classes, masks, and what is wrong with a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.media_files import tone, write_sound
from vitrail.data import open_dataset
from vitrail.errors import ImageError, InvalidOption, VitrailError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images in a folder, with masks of two classes and unknown pixels."""
    for number in range(4):
        for kind in ("images", "masks"):
            (tmp_path / kind).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 12, 3), 40 * number, dtype=np.uint8)).save(tmp_path / f"images/{number}.png")
        mask = np.zeros((8, 12), dtype=np.uint8)
        mask[:, :number], mask[0, 11] = 2, 255
        Image.fromarray(mask).save(tmp_path / f"masks/{number}.png")
    return tmp_path


def write(folder: Path, *lines: str, name: str = "labels.csv") -> Path:
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder / name


def rows(*columns: str) -> list[str]:
    """Return four rows that name images, with further fields."""
    return [f"images/{number}.png,{fields}" for number, fields in enumerate(columns)]


def test_columns_of_every_kind(folder: Path) -> None:
    path = write(folder, "path,breed,count,age,tags", *rows("cat,0,1.5,a;b", "dog,2,2,b", "cat,1,-3,", "dog,0,,c|a"))
    assert open_dataset(path, labels="breed").classes == {"breed": ("cat", "dog")}
    assert open_dataset(path, labels="count").labels.flatten().tolist() == [0, 2, 1, 0]
    ages = open_dataset(path, labels="age")  # numbers with fractions are values
    assert {name: target.kind for name, target in ages.targets.items()} == {"age": "regression"}
    assert ages.labels[:3, 0].tolist() == [1.5, 2.0, -3.0]
    assert ages.labels[3, 0].isnan()
    known = open_dataset(path, labels="age", labeled=True)
    assert (len(known), known.num_unlabeled) == (3, 1)
    scaled = known.scaled_targets["age"]
    assert (scaled.mean, scaled.std) == pytest.approx((np.mean([1.5, 2, -3]), np.std([1.5, 2, -3])))
    tags = open_dataset(path, labels="tags", kind="multilabel", labeled=True)
    assert tags.classes == {"tags": ("a", "b", "c")}
    assert tags.labels.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert tags[2].labels == {"tags": (0, 2)}
    several = open_dataset(path, labels=("breed", "age", "tags"), kind={"tags": "multilabel"}, labeled=True)
    assert several.labels.tolist() == [[0, 1.5, 1, 1, 0], [1, 2, 0, 1, 0]]  # the others lack a value or tags
    assert several[1].labels == {"breed": 1, "age": 2.0, "tags": (1,)}
    assert open_dataset(path, labels="count", kind="regression").labels.flatten().tolist() == [0, 2, 1, 0]


def test_parquet_with_paths(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "file_name": [f"images/{n}.png" for n in range(4)],
        "tags": [["a"], [], ["b", "a"], None],
        "age": [1.0, None, float("nan"), 4.0],
    }
    parquet.write_table(pa.table(columns), folder / "labels.parquet")
    tags = open_dataset(folder / "labels.parquet", labels="tags", labeled=True)  # lists are several classes
    assert tags.labels.tolist() == [[1, 0], [0, 0], [1, 1]]
    assert len(open_dataset(folder / "labels.parquet", labels="age", labeled=True)) == 2
    assert tags[2].image.size == (12, 8)


def test_separators_and_quotes(folder: Path) -> None:
    for name, separator in {"a.csv": ";", "b.tsv": "\t", "c.csv": ","}.items():
        lines = [
            separator.join(fields) for fields in (("file", "label"), ("images/0.png", '"x y"'), ("images/1.png", "z"))
        ]
        assert open_dataset(write(folder, *lines, "", name=name)).classes == {"label": ("x y", "z")}


def test_sounds_by_a_label_file(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", tone(300, 0.1))
    write_sound(tmp_path / "b.wav", tone(600, 0.1))
    dataset = open_dataset(write(tmp_path, "path,pitch", "a.wav,300.5", "b.wav,600"), labels="pitch")
    assert dataset.modality == "audio"
    assert dataset.labels.flatten().tolist() == [300.5, 600.0]


def test_depth_maps(folder: Path) -> None:
    depths = np.linspace(0.5, 9, 96, dtype=np.float32).reshape(8, 12)
    depths[2, 3], depths[0, 2], depths[7, 9] = -1, np.inf, np.nan
    np.save(folder / "depths.npy", depths)
    Image.fromarray(np.full((8, 12), 700, dtype=np.uint16)).save(folder / "depths.png")
    Image.fromarray(depths).save(folder / "depths.tiff")
    files = ("depths.npy", "depths.png", "depths.tiff")
    lines = [f"images/{number}.png,cat,{name}" for number, name in enumerate(files)]
    path = write(folder, "path,label,depth", *lines)
    dataset = open_dataset(path, labels=("label", "depth"), kind={"depth": "depth"}, labeled=True)
    assert dataset.classes == {"label": ("cat",), "depth": ("depth",)}
    known = (depths > 0) & np.isfinite(depths)
    for number, wanted in ((0, depths), (2, depths), (1, np.full((8, 12), 700.0))):
        mask = dataset.read(number).mask
        assert mask.dtype == np.float32
        assert np.array_equal(np.isnan(mask), ~known if number != 1 else np.zeros_like(known))
        assert np.array_equal(mask[known], wanted[known])
    both = dataset.tensor(0, 8)  # the centered square, and the bytes of its depths
    assert both.shape == dataset.spec_at(8).shape == (7, 8, 8)
    square = both[3:].permute(1, 2, 0).contiguous().view(torch.float32)[..., 0]
    assert torch.equal(square.nan_to_num(-1), torch.from_numpy(np.where(known, depths, -1)[:, 2:10]))
    scaled = dataset.scaled_targets["depth"]
    every = np.concatenate([depths[known], depths[known], np.full(96, 700.0)])
    assert (scaled.mean, scaled.std) == (pytest.approx(every.mean(), rel=1e-5), pytest.approx(every.std(), rel=1e-5))


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros((8, 12), dtype=object), "not an array"),
        (np.zeros((8, 12, 3)), r"shape \(H, W\)"),
        (np.zeros((4, 4)), "depth has 4 × 4 pixels"),
    ],
)
def test_damaged_depth_maps(folder: Path, array: np.ndarray, error: str) -> None:
    np.save(folder / "depths.npy", array, allow_pickle=True)
    dataset = open_dataset(write(folder, "path,depth", "images/0.png,depths.npy"), kind="depth")
    with pytest.raises(ImageError, match=error):
        dataset.read(0)


@pytest.mark.parametrize("parallel", [False, True])
def test_masks(folder: Path, parallel: bool) -> None:
    lines = [f"images/{number}.png,masks/{number}.png" for number in range(4)]
    data = folder / "images" if parallel else write(folder, "path,mask", *lines)
    given: dict[str, Any] = {"masks": folder / "masks"} if parallel else {}
    dataset = open_dataset(data, kind="dense", mask_classes=["ground", "wall", "sky"], labeled=True, **given)
    assert dataset.classes == {"mask": ("ground", "wall", "sky")}
    assert dataset.pixel_bytes == 1
    both = dataset.tensor(3, 8)  # the centered square
    assert both.shape == (4, 8, 8)
    assert (both[:3] == 120).all()
    expected = np.zeros((8, 12), dtype=np.uint8)
    expected[:, :3], expected[0, 11] = 2, 255
    assert torch.equal(both[3], torch.from_numpy(expected[:, 2:10]))
    cached = open_dataset(data, **given).cached()
    assert cached.tensor(3, 8).shape == (3, 8, 8)
    assert torch.equal(open_dataset(cached, kind="dense", mask_classes=3).tensor(3, 8)[:3], both[:3])
    binary = open_dataset(data, kind="dense", **given)
    assert binary.classes == {"mask": ("background", "foreground")}
    assert set(binary[3].mask.flatten().tolist()) == {0, 1}
    (batch,) = binary.batches(spec_of(), 4)
    assert batch.labels is None
    assert batch.masks.shape == (4, 16, 16)


def spec_of() -> Any:
    from vitrail.data import InputSpec

    return InputSpec((16, 16))


def test_masks_that_do_not_fit(folder: Path) -> None:
    Image.new("L", (5, 5)).save(folder / "masks/2.png")
    (folder / "masks/1.png").unlink()
    path = write(folder, "path,mask", *[f"images/{number}.png,masks/{number}.png" for number in range(4)])
    dataset = open_dataset(path, kind="dense", mask_classes=2)
    with pytest.raises(ImageError, match=r"row 4: its mask has 5 × 5 pixels, and the image has 12 × 8"):
        dataset.tensor(2, 8)
    with pytest.raises(ImageError, match=r"row 3: its mask .* cannot be read"):
        dataset.tensor(1, 8)
    with pytest.raises(ImageError, match=r"the value 2; expected the numbers of 2 classes"):
        dataset.tensor(3, 8)
    parallel = open_dataset(folder / "images", masks=folder / "masks", kind="dense")
    with pytest.raises(ImageError, match=r"1\.png: there is no mask of this name"):
        parallel.tensor(1, 8)
    (folder / "empty").mkdir()
    Image.new("L", (5, 5)).save(folder / "empty" / "other.png")
    with pytest.raises(ImageError, match="none of the 4 images has a mask there"):
        open_dataset(folder / "images", masks=folder / "empty")
    with pytest.raises(InvalidOption, match="there are no masks"):
        open_dataset(folder / "images", kind="dense")


def test_missing_files_are_skipped_and_named(folder: Path) -> None:
    dataset = open_dataset(write(folder, "path,label", *rows("a", "b"), "images/none.png,a"))
    (batch,) = dataset.batches(spec_of(), 8)
    assert len(batch.images) == 2
    ((name, reason),) = dataset.skipped
    assert name == "images/none.png"
    assert "row 4: there is no file" in reason


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["path,label"], {}, "no rows"),
        ([""], {}, "no rows"),
        (["name,label", "a,b"], {}, "no column names files .*call it 'path'"),
        (["path,label", "elsewhere/0.png,a"], {}, "none of the 1 file in column 'path' exists"),
        (["path,label", *rows("a"), ",b"], {}, "row 3: column 'path' names no file"),
        (["path,label", *rows("a"), "images/0.png,b"], {}, "row 3: 0.png is in row 2, too"),
        (["path,label,label", *rows("a,b")], {}, "missing or repeated"),
        (["path,label", *rows("a,b")], {}, "row 2: 3 fields, and there are 2 columns"),
        (["path,a,b", *rows("x,y")], {"labeled": True}, "several columns; choose labels= from 'a', 'b'"),
        (["path,label", *rows("a")], {"labels": "breed"}, "no such label column; expected one of 'label'"),
        (["path,age", *rows("1.5", "inf")], {"labels": "age"}, "images/1.png: age is inf; expected a finite number"),
        (["path,age", *rows("1", "old")], {"labels": "age", "kind": "regression"}, "age is 'old'|age is '1'"),
        (["path,age", *rows("1.5", "2.5")], {"labels": "age", "kind": "classification"}, "expected a class name"),
        (["path,tags", *rows("", "")], {"labels": "tags", "kind": "multilabel"}, "no sample has a class"),
        (["path,label", *rows("a")], {"labels": "label", "kind": "rank"}, "expected one of classification"),
        (["path,age", *rows("", "")], {"labels": "age", "kind": "regression", "labeled": True}, "has a label"),
        (["path,label", *rows("a")], {"masks": "masks"}, "is a table; name masks in a column"),
    ],
)
def test_broken_label_files(folder: Path, lines: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        open_dataset(write(folder, *lines), **options)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\x00path")
    with pytest.raises(ImageError, match="cannot be read as CSV"):
        open_dataset(tmp_path / "labels.csv")
