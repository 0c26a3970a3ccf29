"""A small model and small images for the tests of embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import vitrail


def small_vit(**options: object) -> vitrail.ViT:
    """Return a ViT of two blocks for images of 16 × 16, with random weights that are always the same."""
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "num_classes": 5}
    return vitrail.ViT(vitrail.ViTConfig(**{**sizes, **options})).eval()


def write_photos(folder: Path, count: int = 20, broken: tuple[int, ...] = ()) -> Path:
    """Write images of several sizes and formats; some of them broken."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        ending = ("png", "jpg", "bmp")[number % 3]
        path = folder / f"{number:03d}.{ending}"
        side = 20 + number
        Image.fromarray(random.integers(0, 255, (side, 24, 3), dtype=np.uint8)).save(path)
        if number in broken:
            path.write_bytes(path.read_bytes()[: 60 if number % 2 else 0])
    return folder


def write_table(path: Path, photos: Path) -> Path:
    """Write images into a parquet file as Hugging Face does."""
    images = [{"bytes": one.read_bytes(), "path": one.name} for one in sorted(photos.iterdir())]
    pq.write_table(pa.table({"image": images}), path, row_group_size=7)
    return path
