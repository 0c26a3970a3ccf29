"""Convert the published datasets to the parquet files that the studies read.

    python -m experiments.prepare imagenette2-320 oxford-iiit-pet free-spoken-digit-dataset --to DATA

Each dataset is recognized by its folders. Imagenette images become center crops of 128 × 128 pixels, pets are resized
to a shorter side of 160, both as WebP; recordings are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image, ImageOps
from rich.progress import track

from experiments.common.cli import exit_on_error
from experiments.common.datasets import bounding_box
from vitrail._atomic_files import write_bytes
from vitrail.errors import ImageError, InvalidOption

Row = dict[str, Any]
Rows = Iterator[Row]

CLASSES = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip
"""Folders and class names of Imagenette, in the order of its classes."""

BACKGROUND = 2
"""Value of the background in the pets' trimaps."""

TEST_TAKES = 5
"""The first takes of each digit and speaker are the test set: the dataset's own split."""


def imagenette(folder: Path, part: str) -> Rows:
    """Yield the images of ``train`` or ``val`` with their classes."""
    for number, (code, name) in enumerate(CLASSES.items()):
        for path in sorted((folder / part / code).glob("*.JPEG")):
            square = ImageOps.fit(open_image(path).convert("RGB"), (128, 128), Image.Resampling.BICUBIC)
            yield {"image": encode_image(square, path.name), "label": number, "label_name": name}


def pets(folder: Path, part: str) -> Rows:
    """Yield the images of ``train`` or ``test`` with trimap, breed, species and the box around pet and border."""
    listed = folder / "annotations" / f"{'trainval' if part == 'train' else part}.txt"
    for line in listed.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, breed, species, _ = line.split()
        image = open_image(folder / "images" / f"{name}.jpg").convert("RGB")
        trimap = open_image(folder / "annotations" / "trimaps" / f"{name}.png")
        scale = 160 / min(image.size)
        size = (max(160, round(scale * image.width)), max(160, round(scale * image.height)))
        small, mask = image.resize(size, Image.Resampling.BICUBIC), trimap.resize(size, Image.Resampling.NEAREST)
        yield {
            "image": encode_image(small, f"{name}.webp"),
            "trimap": encode_image(mask, f"{name}.png"),
            "breed": int(breed) - 1,
            "breed_name": name.rpartition("_")[0],
            "species": int(species) - 1,
            "box": bounding_box(np.asarray(mask) != BACKGROUND),
        }


def digits(folder: Path, part: str) -> Rows:
    """Yield the recordings of ``train`` or ``test`` with digit and speaker."""
    for path in sorted((folder / "recordings").glob("*.wav")):
        digit, speaker, take = path.stem.split("_")
        if (int(take) < TEST_TAKES) == (part == "test"):
            audio = {"bytes": path.read_bytes(), "path": path.name}
            yield {"audio": audio, "digit": int(digit), "speaker": speaker}


Reader = Callable[[Path, str], Rows]
DATASETS: dict[str, tuple[str, Reader, dict[str, str]]] = {
    "Imagenette": ("train/n01440764", imagenette, {part: f"imagenette-128-{part}" for part in ("train", "val")}),
    "Oxford-IIIT Pet": ("annotations/trimaps", pets, {part: f"pets-160-{part}" for part in ("train", "test")}),
    "Free Spoken Digits": ("recordings", digits, {part: f"spoken-digits-{part}" for part in ("train", "test")}),
}
"""For each dataset: a folder that identifies it, the function that reads it, and the output file of each part."""


def open_image(path: Path) -> Image.Image:
    """Read an image as stored, or raise `ImageError`.

    Unlike `vitrail.data`, this applies neither EXIF rotation nor color conversion: masks align with the stored pixels,
    and their palette indices are the values.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"{path}: cannot be read ({error}). Download the dataset again") from error


def encode_image(image: Image.Image, name: str) -> Row:
    """Encode an image for a parquet file: masks (``.png``) as PNG, others as WebP."""
    file = BytesIO()
    image.save(file, **({"format": "PNG"} if name.endswith(".png") else {"format": "WEBP", "quality": 80}))
    return {"bytes": file.getvalue(), "path": name}


def identify(folder: Path) -> tuple[Reader, dict[str, str]]:
    """Return the reader and the output files of the dataset in a folder."""
    for marker, reader, files in DATASETS.values():
        if (folder / marker).is_dir():
            return reader, files
    expected = ", ".join(f"{name} ({marker}/)" for name, (marker, *_) in DATASETS.items())
    raise InvalidOption(f"{folder} is not a known dataset; expected one of {expected}, unpacked")


def to_parquet(rows: list[Row]) -> bytes:
    """Serialize rows as a parquet file."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    file = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return bytes(file.getvalue())


def main(
    folders: Annotated[list[Path], typer.Argument(help="Unpacked datasets: Imagenette, Pets, spoken digits.")],
    to: Annotated[Path, typer.Option(help="Output folder.")],
) -> None:
    """Write the parquet files that the studies read, two for each dataset."""
    with exit_on_error("--to"):
        found = [(folder, *identify(folder)) for folder in folders]
        to.mkdir(parents=True, exist_ok=True)
        for folder, reader, files in found:
            for part, name in files.items():
                rows = list(track(reader(folder, part), description=name))
                if not rows:
                    raise InvalidOption(f"{folder} has no samples for {name}. Unpack the dataset again")
                write_bytes(to / f"{name}.parquet", to_parquet(rows))
                typer.echo(f"{to / name}.parquet: {len(rows):,} rows")


if __name__ == "__main__":
    typer.run(main)
