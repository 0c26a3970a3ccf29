"""Make the files that studies read from what the data sets' own pages offer.

    python -m experiments.prepare imagenette2-320 oxford-iiit-pet free-spoken-digit-dataset --to DATA

Each folder is known by what is in it. Pictures of Imagenette become their middle square of 128 × 128 pixels, pets get a
shorter side of 160, both as WebP; sounds stay as they are.
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

from experiments.common.data import box_around
from experiments.common.machine import ending_plainly
from vitrail.errors import ImageError, InvalidOption
from vitrail.models.saving import write_whole

Row = dict[str, Any]
Rows = Iterator[Row]

CLASSES = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip
"""Folders of Imagenette, in the order of its classes."""

GROUND = 2
"""What is neither pet nor border in a trimap of the pets."""

TAKES_TO_TEST = 5
"""Of each digit and speaker, the first takes are for the test: the set's own split."""


def imagenette(folder: Path, part: str) -> Rows:
    """Give pictures of ``train`` or ``val`` with their classes."""
    for number, (code, name) in enumerate(CLASSES.items()):
        for path in sorted((folder / part / code).glob("*.JPEG")):
            square = ImageOps.fit(opened(path).convert("RGB"), (128, 128), Image.Resampling.BICUBIC)
            yield {"image": packed(square, path.name), "label": number, "label_name": name}


def pets(folder: Path, part: str) -> Rows:
    """Give pictures of ``train`` or ``test`` with mask, breed, species and the box of the pet with its border."""
    listed = folder / "annotations" / f"{'trainval' if part == 'train' else part}.txt"
    for line in listed.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, breed, species, _ = line.split()
        image = opened(folder / "images" / f"{name}.jpg").convert("RGB")
        trimap = opened(folder / "annotations" / "trimaps" / f"{name}.png")
        scale = 160 / min(image.size)
        size = (max(160, round(scale * image.width)), max(160, round(scale * image.height)))
        small, mask = image.resize(size, Image.Resampling.BICUBIC), trimap.resize(size, Image.Resampling.NEAREST)
        yield {
            "image": packed(small, f"{name}.webp"),
            "trimap": packed(mask, f"{name}.png"),
            "breed": int(breed) - 1,
            "breed_name": name.rpartition("_")[0],
            "species": int(species) - 1,
            "box": box_around(np.asarray(mask) != GROUND),
        }


def digits(folder: Path, part: str) -> Rows:
    """Give sounds of ``train`` or ``test`` with what is said and by whom."""
    for path in sorted((folder / "recordings").glob("*.wav")):
        digit, speaker, take = path.stem.split("_")
        if (int(take) < TAKES_TO_TEST) == (part == "test"):
            sound = {"bytes": path.read_bytes(), "path": path.name}
            yield {"audio": sound, "digit": int(digit), "speaker": speaker}


Maker = Callable[[Path, str], Rows]
SETS: dict[str, tuple[str, Maker, dict[str, str]]] = {
    "Imagenette": ("train/n01440764", imagenette, {part: f"imagenette-128-{part}" for part in ("train", "val")}),
    "Oxford-IIIT Pet": ("annotations/trimaps", pets, {part: f"pets-160-{part}" for part in ("train", "test")}),
    "Free Spoken Digits": ("recordings", digits, {part: f"spoken-digits-{part}" for part in ("train", "test")}),
}
"""By what each set is known, how its rows are made, and the file of each part."""


def opened(path: Path) -> Image.Image:
    """Read a picture, or say which one cannot be read.

    Its values are those in the file, neither turned nor brought to other colours as `vitrail.data` would do: masks
    lie on the picture as it is stored, and of a mask's palette the numbers matter.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"{path}: cannot be read ({error}). Fetch the data set again") from error


def packed(image: Image.Image, name: str) -> Row:
    """Give a picture as parquet files hold it: masks as PNG, others as WebP."""
    file = BytesIO()
    image.save(file, **({"format": "PNG"} if name.endswith(".png") else {"format": "WEBP", "quality": 80}))
    return {"bytes": file.getvalue(), "path": name}


def set_in(folder: Path) -> tuple[Maker, dict[str, str]]:
    """Find out which data set a folder holds."""
    for known_by, maker, files in SETS.values():
        if (folder / known_by).is_dir():
            return maker, files
    expected = ", ".join(f"{name} ({known_by}/)" for name, (known_by, *_) in SETS.items())
    raise InvalidOption(f"{folder} holds none of the data sets that are known: {expected}. Unpack one, and name it")


def parquet_of(rows: list[Row]) -> bytes:
    """Write rows as one parquet file."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    file = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return bytes(file.getvalue())


def main(
    folders: Annotated[list[Path], typer.Argument(help="Unpacked data sets: Imagenette, Pets, spoken digits.")],
    to: Annotated[Path, typer.Option(help="Where to write the files.")],
) -> None:
    """Make the files that studies read, two for each data set."""
    with ending_plainly("--to"):
        found = [(folder, *set_in(folder)) for folder in folders]
        to.mkdir(parents=True, exist_ok=True)
        for folder, maker, files in found:
            for part, name in files.items():
                rows = list(track(maker(folder, part), description=name))
                if not rows:
                    raise InvalidOption(f"{folder} has nothing for {name}. Unpack the data set again")
                write_whole(to / f"{name}.parquet", parquet_of(rows))
                typer.echo(f"{to / name}.parquet: {len(rows):,} rows")


if __name__ == "__main__":
    typer.run(main)
