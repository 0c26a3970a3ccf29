"""Parquet files: images, labels, masks and boxes in the layout of Hugging Face; damage costs single rows."""

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

from tests.data.test_decode import png
from vitrail.data import Dataset, InputSpec, open_dataset
from vitrail.data.sources.parquet import ParquetSource
from vitrail.errors import ImageError, InvalidOption

PLAIN = InputSpec((8, 16), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def solid_image(red: int, size: tuple[int, int] = (20, 10)) -> Image.Image:
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
    return {"image": {"bytes": encoded(solid_image(number)), "path": f"folder/{number}.png"}, **more}


def labels(dataset: Dataset) -> list[int]:
    return dataset.labels[:, 0].tolist()


def reds(dataset: Dataset) -> list[int]:
    return [dataset.read(index).image.getpixel((0, 0))[0] for index in range(len(dataset))]


def test_parquet_images_labels_and_names(tmp_path: Path) -> None:
    rows = [row(number, other=7, label=number % 2, label_name=["cat", "dog"][number % 2]) for number in range(5)]
    dataset = open_dataset(table(tmp_path / "a.parquet", rows))
    assert dataset.names == tuple(f"{number}.png" for number in range(5))
    assert dataset.class_names == ("cat", "dog")
    assert labels(dataset) == [0, 1, 0, 1, 0]
    assert reds(dataset) == list(range(5))
    assert [dataset.read(index).image.getpixel((0, 0))[0] for index in (4, 0, 3, 1)] == [4, 0, 3, 1]
    batches = list(dataset.batches(PLAIN, 2))
    assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[0, 1], [0, 1], [0]]
    assert (batches[0].masks, batches[0].boxes) == (None, None)


def test_parquet_files_follow_each_other(tmp_path: Path) -> None:
    first = table(tmp_path / "data-0.parquet", [row(number, label=number) for number in (0, 1)])
    second = table(tmp_path / "data-1.parquet", [row(number, label=number) for number in (2, 3, 4)])
    for source in ([first, second], tmp_path):
        dataset = open_dataset(source)
        assert reds(dataset) == [0, 1, 2, 3, 4]
        assert labels(dataset) == [0, 1, 2, 3, 4]
        assert reds(dataset.select([1, 3])) == [1, 3]
    assert reds(open_dataset([second, first], limit=2)) == [2, 4]
    other = table(tmp_path / "other.parquet", [row(0, label=0, species=1)])
    assert len(open_dataset([first, other])) == 3
    odd = table(tmp_path / "odd.parquet", [{"picture": encoded(solid_image(0)), "label": 1}])
    with pytest.raises(ImageError, match=r"odd\.parquet: its columns"):
        open_dataset([first, odd])
    solid_image(3).save(tmp_path / "3.png")
    with pytest.raises(InvalidOption, match="parquet file"):
        open_dataset([first, tmp_path / "3.png"])


def test_parquet_without_suffix_is_recognized_by_its_bytes(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [row(5)]).rename(tmp_path / "download")
    assert reds(open_dataset(path)) == [5]


def test_columns_of_labels(tmp_path: Path) -> None:
    rows = [row(n, id=n, breed=10 + n, species=n % 2, kind=["b", "a", None][n]) for n in range(3)]
    path = table(tmp_path / "a.parquet", rows)
    assert labels(open_dataset(path)) == [10, 11, 12]
    assert labels(open_dataset(path, labels="species")) == [0, 1, 0]
    assert labels(open_dataset(path, labels="id")) == [0, 1, 2]
    words = open_dataset(path, labels="kind")
    assert (labels(words), words.class_names) == ([1, 0, -1], ("a", "b"))
    with pytest.raises(InvalidOption, match=r"labels='sort'.*'id', 'breed', 'species', 'kind'"):
        open_dataset(path, labels="sort")
    assert not open_dataset(table(tmp_path / "b.parquet", [row(1, id=4, image_id=3)])).classes
    solid_image(3).save(tmp_path / "3.png")
    with pytest.raises(InvalidOption, match="names a column"):
        open_dataset(tmp_path / "3.png", labels="kind")


def test_names_of_classes_from_hugging_face(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    schema = arrow.schema([("image", image), ("label", arrow.int64())])
    path = table(
        tmp_path / "a.parquet", [row(0, label=1)], schema=schema.with_metadata({"huggingface": json.dumps(features)})
    )
    assert open_dataset(path).class_names == ("cat", "dog")
    path = table(tmp_path / "b.parquet", [row(0, label=1)], schema=schema.with_metadata({"huggingface": "{"}))
    assert open_dataset(path).class_names is None


def test_partly_labeled_data(tmp_path: Path) -> None:
    rows = [row(0, label=2), row(1, label=None), row(2, label=-1), row(3, label=0)]
    dataset = open_dataset(table(tmp_path / "a.parquet", rows))
    assert labels(dataset) == [2, -1, -1, 0]
    (batch,) = dataset.batches(PLAIN, 4)
    assert batch.labels is not None
    assert batch.labels.tolist() == [2, -1, -1, 0]
    unlabelled = open_dataset(table(tmp_path / "b.parquet", [row(0, label=-1), row(1, label=-1)]))
    assert not unlabelled.classes
    assert next(unlabelled.batches(PLAIN, 2)).labels is None


def test_trimaps_masks_and_boxes(tmp_path: Path) -> None:
    pixels = [[1] * 10 + [2] * 10] * 5 + [[3] * 10 + [0] * 10] * 5
    rows = [row(0, trimap={"bytes": values(pixels)}, box=[5, 0, 10, 5]), row(1, trimap=None, box=None)]
    dataset = open_dataset(table(tmp_path / "a.parquet", rows))
    first, second = dataset.read(0), dataset.read(1)
    assert first.mask is not None
    expected = np.repeat(np.repeat(np.array([[1, 0], [255, 255]], dtype=np.uint8), 5, 0), 10, 1)
    assert (first.mask == expected).all()
    assert first.boxes == ((5.0, 0.0, 10.0, 5.0),)
    assert (second.mask, second.boxes) == (None, None)
    (batch,) = dataset.batches(PLAIN, 2)  # 20 × 10 pixels become 16 × 8
    assert batch.masks is not None
    assert (batch.masks.dtype, batch.masks.shape) == (torch.uint8, (2, 8, 16))
    assert batch.masks[0, ::7, ::15].tolist() == [[1, 0], [255, 255]]
    assert batch.masks[1].unique().tolist() == [255]
    assert batch.boxes == [((4.0, 0.0, 8.0, 4.0),), ()]

    palette = Image.fromarray(np.array([[0, 1] * 10] * 10, dtype=np.uint8), mode="P")
    palette.putpalette([9, 9, 9, 0, 0, 0])  # index 0 is grey and index 1 black: the index counts
    wide = [[0.0, 0.0, 30.0, 5.0], [1.0, 1.0, 2.0, 2.0]]
    path = table(tmp_path / "b.parquet", [{"img": encoded(solid_image(4)), "mask": encoded(palette), "boxes": wide}])
    sample = open_dataset(path).read(0)
    assert sample.mask is not None
    assert sample.mask[0, :4].tolist() == [0, 1, 0, 1]
    assert sample.boxes == ((0.0, 0.0, 20.0, 5.0), (1.0, 1.0, 2.0, 2.0))
    assert sample.name == "b.parquet, row 0"


def test_colors_and_opacity_of_masks(tmp_path: Path) -> None:
    rgba = np.zeros((10, 20, 4), dtype=np.uint8)
    rgba[..., 3], rgba[:, :5, 1] = 255, 200
    path = table(tmp_path / "a.parquet", [row(0, mask={"bytes": encoded(Image.fromarray(rgba))})])
    mask = open_dataset(path).read(0).mask
    assert mask is not None
    assert (mask.sum(), mask[:, :5].all()) == (50, True)


BROKEN = {
    "bytes": ({"image": {"bytes": b"no picture", "path": "x.png"}}, "row 1 (x.png): not an image"),
    "empty": ({"image": {"bytes": b"", "path": "x.png"}}, "the image is empty"),
    "cut off": (
        {"image": {"bytes": encoded(Image.effect_noise((64, 64), 9))[:900], "path": "x"}},
        "damaged or cut off",
    ),
    "huge": ({"image": {"bytes": png(11_000, 11_000), "path": "x.png"}}, "121 megapixels"),
    "program": ({"image": {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n", "path": "x.eps"}}, "not an image"),
    "path alone": ({"image": {"bytes": None, "path": "/etc/passwd"}}, "a path alone is not followed"),
    "null": ({"image": None}, "the row has no image"),
    "mask": ({"mask": {"bytes": b"no mask", "path": None}}, "mask: not an image"),
    "mask's size": ({"mask": {"bytes": values([[0, 1]]), "path": None}}, "2 × 1 pixels, and the image has 20 × 10"),
    "short box": ({"box": [1, 2, 3]}, "is not a box"),
    "turned box": ({"box": [5, 5, 1, 9]}, "[5.0, 5.0, 1.0, 9.0] is not a box in an image of 20 × 10"),
    "box outside": ({"box": [25, 0, 30, 5]}, "is not a box"),
    "endless box": ({"box": [0, 0, float("nan"), 5]}, "is not a box"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_skipped_and_named(tmp_path: Path, name: str) -> None:
    change, reason = BROKEN[name]
    good = {"mask": {"bytes": values([[1] * 20] * 10), "path": None}, "box": [0.0, 0.0, 9.0, 9.0]}
    rows = [row(0, **good), row(1, **good) | change, row(2, **good)]
    dataset = open_dataset(table(tmp_path / "a.parquet", rows))
    assert [batch.indices for batch in dataset.batches(PLAIN, 4)] == [(0, 2)]
    ((called, why),) = dataset.skipped
    assert called == dataset.names[1]
    assert reason in why
    assert "a.parquet, row 1" in why


def test_no_images_in_a_parquet_file(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [{"audio": {"bytes": b"RIFF", "path": "a.wav"}, "digit": 1}])
    with pytest.raises(ImageError, match=r"no column holds images.*'audio', 'digit'"):
        open_dataset(path, modality="image")
    with pytest.raises(ImageError, match="has no rows"):
        open_dataset(table(tmp_path / "b.parquet", [row(0)], schema=None).parent / _empty(tmp_path))
    (tmp_path / "c.parquet").write_text("no table")
    with pytest.raises(ImageError, match=r"c\.parquet: not a parquet file"):
        open_dataset(tmp_path / "c.parquet")
    with pytest.raises(ImageError, match="no such file"):
        open_dataset(tmp_path / "missing.parquet")


def _empty(folder: Path) -> str:
    from pyarrow import parquet

    parquet.write_table(parquet.read_table(folder / "b.parquet").slice(0, 0), folder / "empty.parquet")
    return "empty.parquet"


def test_a_damaged_row_group_loses_only_its_own_rows(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [row(number, label=number) for number in range(6)])
    from pyarrow import parquet

    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    dataset = open_dataset(path)
    assert [batch.indices for batch in dataset.batches(PLAIN, 6)] == [(0, 1, 4, 5)]
    assert [reason.partition(" (")[0] for _, reason in dataset.skipped] == ["a.parquet, row 2", "a.parquet, row 3"]


def test_images_are_streamed_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.sources.parquet.PIECE_ROWS", 3)
    path = table(tmp_path / "a.parquet", [row(number) for number in range(20)], group=10)
    source = ParquetSource([path])
    seen = []
    for number in range(20):
        assert source.fetch(number)().image.getpixel((0, 0))[0] == number
        assert source._rows is not None
        seen.append(len(source._rows._piece))
    assert max(seen) == 3
    assert source.fetch(2)().image.getpixel((0, 0))[0] == 2


def test_without_pyarrow_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImageError, match=r"pip install vitrail\[data\]"):
        open_dataset(tmp_path / "a.parquet")


def test_pets(shared_data: Path) -> None:
    path = shared_data / "pets-160-test.parquet"
    if not path.is_file():
        pytest.skip("needs the Pets data set in ../shared/data, which this machine does not have")
    pytest.importorskip("pyarrow", reason="parquet files need it")
    dataset = open_dataset(path, limit=60)
    assert len(dataset) == 60
    assert dataset.class_names is not None
    assert len(dataset.class_names) == 37
    assert len(set(labels(dataset))) > 20
    batches = list(dataset.batches(InputSpec((32, 32)), 32))
    assert dataset.skipped == []
    masks = torch.cat([batch.masks for batch in batches if batch.masks is not None])
    assert set(masks.unique().tolist()) == {0, 1, 255}
    boxes = [boxes for batch in batches for boxes in batch.boxes or []]
    assert sum(map(len, boxes)) > 50
    for mask, found in zip(masks, boxes, strict=True):
        for x0, y0, x1, y1 in found:
            inside = mask[int(y0) : int(y1 + 1), int(x0) : int(x1 + 1)]
            assert (inside == 1).sum() >= (mask == 1).sum() - 2  # the box is around the pet
    assert open_dataset(path, labels="species").labels.unique().tolist() == [0, 1]
