"""Collections: every kind of source gives the same kind of samples; what cannot be read is skipped and named."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.pictures.test_reading import png
from vitrail.data import Collection, Preprocessing, open_collection, to_tensor
from vitrail.data.sources.parquet import ParquetPictures
from vitrail.errors import ImageError, InvalidOption

PLAIN = Preprocessing((8, 16), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def picture(red: int, size: tuple[int, int] = (20, 10)) -> Image.Image:
    return Image.new("RGB", size, (red, 0, 0))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def values(rows: Sequence[Sequence[int]]) -> bytes:
    return encoded(Image.fromarray(np.array(rows, dtype=np.uint8)))


def table(path: Path, rows: Sequence[dict[str, Any]], *, group: int = 2, schema: Any = None) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(list(rows), schema=schema), path, row_group_size=group)
    return path


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"image": {"bytes": encoded(picture(number)), "path": f"folder/{number}.png"}, **more}


def reds(collection: Collection) -> list[int]:
    return [collection.read(index).picture.getpixel((0, 0))[0] for index in collection.indices]


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    root = tmp_path / "classes"
    for number in range(6):
        folder = root / ("dog" if number % 2 else "cat")
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")
    return root


# ---------------------------------------------------------------- files and folders


def test_samples_by_default() -> None:
    collection = open_collection()
    assert collection.names == ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")
    assert (collection.has_labels, collection.has_masks, collection.has_boxes) == (False, False, False)
    assert collection.label_names is None
    sample = collection.read(1)
    assert (sample.name, sample.picture.size, sample[2:]) == ("chelsea.jpg", (451, 300), (None, None, None))


def test_files_are_named_shortly_where_that_tells_them_apart(classes: Path) -> None:
    other = classes.parent / "0.png"
    picture(9).save(other)
    collection = open_collection([classes / "cat" / "0.png", str(other), classes / "dog" / "1.png"])
    assert collection.names == (str(classes / "cat" / "0.png"), str(other), "1.png")
    assert reds(collection) == [0, 9, 1]
    assert not collection.has_labels
    assert open_collection(str(other)).names == ("0.png",)


def test_class_folders_are_labels(classes: Path) -> None:
    collection = open_collection(classes)
    assert collection.label_names == ("cat", "dog")
    assert collection.names == ("cat/0.png", "cat/2.png", "cat/4.png", "dog/1.png", "dog/3.png", "dog/5.png")
    assert collection.labels == (0, 0, 0, 1, 1, 1)
    assert collection.read(3).label == 1


def test_other_folders_are_not_labels(classes: Path) -> None:
    assert not open_collection(classes.parent).has_labels  # train/cat, train/dog: `train` is not a class
    assert not open_collection([classes]).read(0).label  # cat is 0
    assert not open_collection([classes / "cat", classes / "dog"]).has_labels
    assert not open_collection(classes / "cat").has_labels
    picture(9).save(classes / "9.png")
    assert not open_collection(classes).has_labels


def test_limit_is_spread_over_all(classes: Path) -> None:
    collection = open_collection(classes, limit=2)
    assert (collection.names, collection.labels, list(collection.indices)) == (
        ("cat/0.png", "dog/1.png"),
        (0, 1),
        [0, 1],
    )
    assert reds(collection) == [0, 1]
    assert len(open_collection(classes, limit=99)) == 6
    with pytest.raises(InvalidOption, match="limit=0: expected 1 or more"):
        open_collection(classes, limit=0)


def test_odd_file_names_can_be_printed(tmp_path: Path) -> None:
    name = b"a\xff\x1b[31m.png".decode("utf-8", "surrogateescape")
    picture(3).save(tmp_path / name)
    collection = open_collection(tmp_path)
    assert collection.names[0].isprintable()
    assert collection.names[0].encode()
    assert reds(collection) == [3]


# ---------------------------------------------------------------- parts and batches


def test_parts_share_the_pictures_and_keep_their_indices(classes: Path) -> None:
    whole = open_collection(classes)
    parts = [whole.part(rank, 4) for rank in range(4)]
    assert [list(part.indices) for part in parts] == [[0, 4], [1, 5], [2], [3]]
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert parts[1].names == whole.names
    assert reds(parts[1]) == [reds(whole)[1], reds(whole)[5]]
    assert [batch.indices for batch in parts[1].batches(PLAIN, 1)] == [(1,), (5,)]
    assert list(whole.part(6, 7).batches(PLAIN, 1)) == []  # nothing left for it, and no error
    for rank, world in ((-1, 2), (2, 2)):
        with pytest.raises(InvalidOption, match="expected a rank from 0"):
            whole.part(rank, world)


def test_batches_are_what_the_model_expects(classes: Path) -> None:
    collection = open_collection(classes)
    batches = list(collection.batches(PLAIN, 4))
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4, 5)]
    assert batches[0].images.shape == (4, 3, 8, 16)
    assert torch.equal(batches[1].images, to_tensor([collection.read(4).picture, collection.read(5).picture], PLAIN))
    assert batches[0].names == collection.names[:4]
    assert torch.equal(torch.cat([batch.labels for batch in batches]), torch.tensor(collection.labels))
    assert batches[0].masks is None
    assert batches[0].boxes is None
    assert [batch.indices for batch in collection.batches(PLAIN, 2, limit=3)] == [(0, 1), (2,)]
    for options in ({"batch_size": 0}, {"batch_size": 1, "limit": 0}):
        with pytest.raises(InvalidOption, match="=0: expected 1 or more"):
            next(collection.batches(PLAIN, **options))


def test_another_size_than_the_model_expects(classes: Path) -> None:
    collection = open_collection(classes, size=(4, 6))
    for part in (collection, collection.part(1, 2)):
        assert next(part.batches(PLAIN, 2)).images.shape == (2, 3, 4, 6)


def test_broken_pictures_are_skipped_counted_once_and_named(classes: Path) -> None:
    (classes / "cat" / "2.png").write_text("no picture")
    (classes / "dog" / "5.png").write_bytes(png(11_000, 11_000))
    collection = open_collection(classes)
    told: list[tuple[str, str]] = []
    for _ in range(2):
        batches = list(collection.batches(PLAIN, 3, on_skip=lambda *skip: told.append(skip)))
        assert [batch.indices for batch in batches] == [(0, 2, 3), (4,)]
    assert [name for name, _ in collection.skipped] == ["cat/2.png", "dog/5.png"]
    assert "not a picture" in collection.skipped[0][1]
    assert "121 megapixels" in collection.skipped[1][1]
    assert told == collection.skipped * 2


def test_none_readable_is_an_error_but_not_of_a_part(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    collection = open_collection(tmp_path)
    with pytest.raises(ImageError, match=r"None of the 2 pictures could be read.*The first: .*a\.png.*empty"):
        list(collection.batches(PLAIN, 2))
    assert list(collection.part(0, 2).batches(PLAIN, 2)) == []
    with pytest.raises(ImageError, match="no such file"):
        open_collection(tmp_path / "missing.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="No pictures found"):
        open_collection(tmp_path / "empty")


# ---------------------------------------------------------------- parquet


def test_parquet_pictures_labels_and_names(tmp_path: Path) -> None:
    rows = [row(number, other=7, label=number % 2, label_name=["cat", "dog"][number % 2]) for number in range(5)]
    collection = open_collection(table(tmp_path / "a.parquet", rows))
    assert collection.names == tuple(f"{number}.png" for number in range(5))
    assert collection.label_names == ("cat", "dog")
    assert collection.labels == (0, 1, 0, 1, 0)
    assert reds(collection) == list(range(5))
    assert [collection.read(index).picture.getpixel((0, 0))[0] for index in (4, 0, 3, 1)] == [4, 0, 3, 1]
    batches = list(collection.batches(PLAIN, 2))
    assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[0, 1], [0, 1], [0]]
    assert (batches[0].masks, batches[0].boxes) == (None, None)


def test_parquet_files_follow_each_other(tmp_path: Path) -> None:
    first = table(tmp_path / "data-0.parquet", [row(number, label=number) for number in (0, 1)])
    second = table(tmp_path / "data-1.parquet", [row(number, label=number) for number in (2, 3, 4)])
    for source in ([first, second], tmp_path):
        collection = open_collection(source)
        assert reds(collection) == [0, 1, 2, 3, 4]
        assert collection.labels == (0, 1, 2, 3, 4)
        assert reds(collection.part(1, 2)) == [1, 3]
    assert reds(open_collection([second, first], limit=2)) == [2, 4]
    other = table(tmp_path / "other.parquet", [row(0, label=0, species=1)])
    assert len(open_collection([first, other])) == 3
    odd = table(tmp_path / "odd.parquet", [{"picture": encoded(picture(0)), "label": 1}])
    with pytest.raises(ImageError, match=r"odd\.parquet: its columns are not those of .*data-0\.parquet"):
        open_collection([first, odd])
    picture(3).save(tmp_path / "3.png")
    with pytest.raises(InvalidOption, match=r"is a parquet file, and .*3\.png is not"):
        open_collection([first, tmp_path / "3.png"])


def test_parquet_without_a_name_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [row(5)]).rename(tmp_path / "download")
    assert reds(open_collection(path)) == [5]


def test_columns_of_labels(tmp_path: Path) -> None:
    rows = [row(n, id=n, breed=10 + n, species=n % 2, kind=["b", "a", None][n]) for n in range(3)]
    path = table(tmp_path / "a.parquet", rows)
    assert open_collection(path).labels == (10, 11, 12)
    assert open_collection(path, labels="species").labels == (0, 1, 0)
    assert open_collection(path, labels="id").labels == (0, 1, 2)
    words = open_collection(path, labels="kind")
    assert (words.labels, words.label_names) == ((1, 0, None), ("a", "b"))
    with pytest.raises(InvalidOption, match=r"labels='sort'.*Expected one of 'id', 'breed', 'species', 'kind'"):
        open_collection(path, labels="sort")
    assert not open_collection(table(tmp_path / "b.parquet", [row(1, id=4, image_id=3)])).has_labels
    picture(3).save(tmp_path / "3.png")
    with pytest.raises(InvalidOption, match="names a column of a parquet file"):
        open_collection(tmp_path / "3.png", labels="kind")


def test_names_of_classes_from_hugging_face(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    schema = arrow.schema([("image", image), ("label", arrow.int64())])
    path = table(
        tmp_path / "a.parquet", [row(0, label=1)], schema=schema.with_metadata({"huggingface": json.dumps(features)})
    )
    assert open_collection(path).label_names == ("cat", "dog")
    path = table(tmp_path / "b.parquet", [row(0, label=1)], schema=schema.with_metadata({"huggingface": "{"}))
    assert open_collection(path).label_names is None


def test_partly_labelled_data(tmp_path: Path) -> None:
    rows = [row(0, label=2), row(1, label=None), row(2, label=-1), row(3, label=0)]
    collection = open_collection(table(tmp_path / "a.parquet", rows))
    assert collection.labels == (2, None, None, 0)
    (batch,) = collection.batches(PLAIN, 4)
    assert batch.labels is not None
    assert batch.labels.tolist() == [2, -1, -1, 0]
    unlabelled = open_collection(table(tmp_path / "b.parquet", [row(0, label=-1), row(1, label=-1)]))
    assert not unlabelled.has_labels
    assert next(unlabelled.batches(PLAIN, 2)).labels is None


def test_trimaps_masks_and_boxes(tmp_path: Path) -> None:
    pixels = [[1] * 10 + [2] * 10] * 5 + [[3] * 10 + [0] * 10] * 5
    rows = [row(0, trimap={"bytes": values(pixels)}, box=[5, 0, 10, 5]), row(1, trimap=None, box=None)]
    collection = open_collection(table(tmp_path / "a.parquet", rows))
    first, second = collection.read(0), collection.read(1)
    assert first.mask is not None
    expected = np.repeat(np.repeat(np.array([[1, 0], [255, 255]], dtype=np.uint8), 5, 0), 10, 1)
    assert (first.mask == expected).all()
    assert first.boxes == ((5.0, 0.0, 10.0, 5.0),)
    assert (second.mask, second.boxes) == (None, None)
    (batch,) = collection.batches(PLAIN, 2)  # 20 × 10 pixels become 16 × 8
    assert batch.masks is not None
    assert (batch.masks.dtype, batch.masks.shape) == (torch.uint8, (2, 8, 16))
    assert batch.masks[0, ::7, ::15].tolist() == [[1, 0], [255, 255]]
    assert batch.masks[1].unique().tolist() == [255]
    assert batch.boxes == [((4.0, 0.0, 8.0, 4.0),), ()]

    palette = Image.fromarray(np.array([[0, 1] * 10] * 10, dtype=np.uint8), mode="P")
    palette.putpalette([9, 9, 9, 0, 0, 0])  # index 0 is grey and index 1 black: the index counts
    wide = [[0.0, 0.0, 30.0, 5.0], [1.0, 1.0, 2.0, 2.0]]
    path = table(tmp_path / "b.parquet", [{"img": encoded(picture(4)), "mask": encoded(palette), "boxes": wide}])
    sample = open_collection(path).read(0)
    assert sample.mask is not None
    assert sample.mask[0, :4].tolist() == [0, 1, 0, 1]
    assert sample.boxes == ((0.0, 0.0, 20.0, 5.0), (1.0, 1.0, 2.0, 2.0))
    assert sample.name == "b.parquet, row 0"


def test_colours_and_opacity_of_masks(tmp_path: Path) -> None:
    rgba = np.zeros((10, 20, 4), dtype=np.uint8)
    rgba[..., 3], rgba[:, :5, 1] = 255, 200
    path = table(tmp_path / "a.parquet", [row(0, mask={"bytes": encoded(Image.fromarray(rgba))})])
    mask = open_collection(path).read(0).mask
    assert mask is not None
    assert (mask.sum(), mask[:, :5].all()) == (50, True)


BROKEN = {
    "bytes": ({"image": {"bytes": b"no picture", "path": "x.png"}}, "row 1 (x.png): this is not a picture"),
    "empty": ({"image": {"bytes": b"", "path": "x.png"}}, "the picture is empty"),
    "cut off": (
        {"image": {"bytes": encoded(Image.effect_noise((64, 64), 9))[:900], "path": "x"}},
        "damaged or cut off",
    ),
    "huge": ({"image": {"bytes": png(11_000, 11_000), "path": "x.png"}}, "121 megapixels"),
    "program": ({"image": {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n", "path": "x.eps"}}, "not a picture"),
    "path alone": ({"image": {"bytes": None, "path": "/etc/passwd"}}, "a path alone is not followed"),
    "null": ({"image": None}, "the row has no picture"),
    "mask": ({"mask": {"bytes": b"no mask", "path": None}}, "mask: this is not a picture"),
    "mask's size": ({"mask": {"bytes": values([[0, 1]]), "path": None}}, "2 × 1 pixels, and the picture has 20 × 10"),
    "short box": ({"box": [1, 2, 3]}, "is not a box"),
    "turned box": ({"box": [5, 5, 1, 9]}, "[5.0, 5.0, 1.0, 9.0] is not a box in a picture of 20 × 10"),
    "box outside": ({"box": [25, 0, 30, 5]}, "is not a box"),
    "endless box": ({"box": [0, 0, float("nan"), 5]}, "is not a box"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_skipped_and_named(tmp_path: Path, name: str) -> None:
    change, reason = BROKEN[name]
    good = {"mask": {"bytes": values([[1] * 20] * 10), "path": None}, "box": [0.0, 0.0, 9.0, 9.0]}
    rows = [row(0, **good), row(1, **good) | change, row(2, **good)]
    collection = open_collection(table(tmp_path / "a.parquet", rows))
    assert [batch.indices for batch in collection.batches(PLAIN, 4)] == [(0, 2)]
    ((called, why),) = collection.skipped
    assert called == collection.names[1]
    assert reason in why
    assert "a.parquet, row 1" in why


def test_no_pictures_in_a_parquet_file(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [{"audio": {"bytes": b"RIFF", "path": "a.wav"}, "digit": 1}])
    with pytest.raises(ImageError, match=r"no column holds pictures.*'audio', 'digit'"):
        open_collection(path)
    with pytest.raises(ImageError, match="has no rows"):
        open_collection(table(tmp_path / "b.parquet", [row(0)], schema=None).parent / _empty(tmp_path))
    (tmp_path / "c.parquet").write_text("no table")
    with pytest.raises(ImageError, match=r"c\.parquet: this is not a parquet file, or it is damaged"):
        open_collection(tmp_path / "c.parquet")
    with pytest.raises(ImageError, match="no such file"):
        open_collection(tmp_path / "missing.parquet")


def _empty(folder: Path) -> str:
    from pyarrow import parquet

    parquet.write_table(parquet.read_table(folder / "b.parquet").slice(0, 0), folder / "empty.parquet")
    return "empty.parquet"


def test_a_damaged_row_group_costs_its_own_rows_alone(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [row(number, label=number) for number in range(6)])
    from pyarrow import parquet

    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    collection = open_collection(path)
    assert [batch.indices for batch in collection.batches(PLAIN, 6)] == [(0, 1, 4, 5)]
    assert [reason.partition(" (")[0] for _, reason in collection.skipped] == ["a.parquet, row 2", "a.parquet, row 3"]


def test_pictures_are_streamed_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.sources.parquet.PIECE_ROWS", 3)
    path = table(tmp_path / "a.parquet", [row(number) for number in range(20)], group=10)
    source = ParquetPictures([path])
    seen = []
    for number in range(20):
        assert source.read(number).picture.getpixel((0, 0))[0] == number
        assert source._rows is not None
        seen.append(len(source._rows._piece))
    assert max(seen) == 3
    assert source.read(2).picture.getpixel((0, 0))[0] == 2


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImageError, match=r"pip install vitrail\[data\]"):
        open_collection(tmp_path / "a.parquet")


def test_pets(shared_data: Path) -> None:
    path = shared_data / "pets-160-test.parquet"
    if not path.is_file():
        pytest.skip("needs the Pets data set in ../shared/data, which this machine does not have")
    pytest.importorskip("pyarrow", reason="parquet files need it")
    collection = open_collection(path, limit=60)
    assert len(collection) == 60
    assert collection.label_names is not None
    assert len(collection.label_names) == 37
    assert len(set(collection.labels)) > 20
    batches = list(collection.batches(Preprocessing((32, 32)), 32))
    assert collection.skipped == []
    masks = torch.cat([batch.masks for batch in batches if batch.masks is not None])
    assert set(masks.unique().tolist()) == {0, 1, 255}
    boxes = [boxes for batch in batches for boxes in batch.boxes or []]
    assert sum(map(len, boxes)) > 50
    for mask, found in zip(masks, boxes, strict=True):
        for x0, y0, x1, y1 in found:
            inside = mask[int(y0) : int(y1 + 1), int(x0) : int(x1 + 1)]
            assert (inside == 1).sum() >= (mask == 1).sum() - 2  # the box is around the pet
    assert len(open_collection(path, labels="species").labels) == 3669
    assert set(open_collection(path, labels="species").labels) == {0, 1}
