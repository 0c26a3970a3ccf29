"""Small labeled datasets of every source format."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

BROKEN = b"this is not an image"


def solid_image(number: int, size: tuple[int, int] = (12, 12)) -> Image.Image:
    """Return an image whose colors encode its number, with different left and right halves."""
    values = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    values[..., 0] = number
    values[..., 1] = np.arange(size[0], dtype=np.uint8) * 3
    values[..., 2] = 255 - number
    return Image.fromarray(values)


def encoded(number: int, size: tuple[int, int] = (12, 12)) -> bytes:
    buffer = io.BytesIO()
    solid_image(number, size).save(buffer, format="PNG")
    return buffer.getvalue()


def class_folders(root: Path, count: int = 12, broken: tuple[int, ...] = (), classes: str = "ab") -> Path:
    """Image ``number`` is of class ``number % len(classes)``; in the order of files, one class follows the other."""
    for number in range(count):
        folder = root / classes[number % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.png").write_bytes(BROKEN if number in broken else encoded(number))
    return root


def table(path: Path, count: int = 12, broken: tuple[int, ...] = (), **columns: list[Any]) -> Path:
    """Write a parquet file with ``count`` images and these columns."""
    arrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    from pyarrow import parquet

    rows = [
        {
            "image": {"bytes": BROKEN if number in broken else encoded(number), "path": f"{number}.png"},
            **{name: values[number] for name, values in columns.items()},
        }
        for number in range(count)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=5)
    return path


def shard(path: Path, samples: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a tar file with files by name and suffix; bytes are written unchanged, other values as JSON or text."""
    with tarfile.open(path, "w") as tar:
        for name, files in samples.items():
            for kind, value in files.items():
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                entry = tarfile.TarInfo(f"{name}.{kind}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


class Pairs:
    """A dataset as torch knows them."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        item = self._items[index]
        if isinstance(item, Exception):
            raise item
        return item
