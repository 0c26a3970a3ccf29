"""Conversion of the published datasets to files that the studies read."""

import wave
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer import Typer
from typer.testing import CliRunner

from experiments import prepare
from experiments.common import datasets

pytest.importorskip("pyarrow", reason="parquet files need it")

APP = Typer()
APP.command()(prepare.main)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Create three small datasets in the layout of the published ones."""
    root = tmp_path / "published"
    for part, count in (("train", 2), ("val", 1)):
        for number, code in enumerate(prepare.CLASSES):
            folder = root / "imagenette2" / part / code
            folder.mkdir(parents=True)
            for one in range(count):  # wide images whose center has the color of the class
                image = Image.new("RGB", (320, 160), (0, 0, 0))
                image.paste((20 * number, 100, 200), (80, 0, 240, 160))
                image.save(folder / f"{code}_{one}.JPEG", quality=95)
    pets = root / "pets"
    (pets / "images").mkdir(parents=True)
    (pets / "annotations" / "trimaps").mkdir(parents=True)
    for listed in ("trainval", "test"):
        lines = ["#Image CLASS-ID SPECIES BREED ID"]
        for breed, species, name in ((1, 1, f"Abyssinian_{listed}"), (2, 2, f"american_bulldog_{listed}")):
            Image.new("RGB", (400, 320), (breed * 50, 0, 0)).save(pets / "images" / f"{name}.jpg")
            trimap = np.full((320, 400), 2, np.uint8)
            trimap[40:200, 80:240] = 3
            trimap[80:160, 120:200] = 1
            Image.fromarray(trimap).save(pets / "annotations" / "trimaps" / f"{name}.png")
            lines.append(f"{name} {breed} {species} 1")
        (pets / "annotations" / f"{listed}.txt").write_text("\n".join(lines) + "\n")
    (root / "digits" / "recordings").mkdir(parents=True)
    for speaker in ("george", "theo"):
        for take in (4, 5, 6):
            with wave.open(str(root / "digits" / "recordings" / f"7_{speaker}_{take}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                file.writeframes(np.full(4000, 1000 * take, "<i2").tobytes())
    return root


def test_studies_read_the_converted_files(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(published / name) for name in ("imagenette2", "pets", "digits")]
    result = CliRunner().invoke(APP, [*folders, "--to", str(tmp_path / "made")])
    assert result.exit_code == 0, result.output
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path / "made"))

    images = datasets.imagenette.__wrapped__()
    assert (len(images.train), len(images.validation)) == (20, 10)
    assert images.train.classes == {"label": tuple(prepare.CLASSES.values())}

    both = datasets.pets.__wrapped__()
    assert (len(both.train), len(both.validation)) == (2, 2)
    assert both.train.classes["breed"] == ("Abyssinian", "american_bulldog")

    spoken = datasets.digits.__wrapped__()
    assert (len(spoken.train), len(spoken.validation)) == (4, 2)


def test_images_are_center_crops(published: Path) -> None:
    row = list(prepare.imagenette(published / "imagenette2", "val"))[7]
    assert (row["label"], row["label_name"]) == (7, "gas pump")
    image = Image.open(BytesIO(row["image"]["bytes"]))
    assert image.size == (128, 128)
    assert np.abs(np.asarray(image, int) - (140, 100, 200)).max() < 12  # no black sides


def test_pets_have_labels_and_boxes_of_the_resized_image(published: Path) -> None:
    first, second = prepare.pets(published / "pets", "train")
    assert (first["breed"], first["breed_name"], first["species"]) == (0, "Abyssinian", 0)
    assert (second["breed"], second["breed_name"], second["species"]) == (1, "american_bulldog", 1)
    assert first["box"] == [40, 20, 120, 100]  # half of 80, 40, 240, 200: the border belongs to the pet


def test_empty_mask_has_no_box() -> None:
    assert datasets.bounding_box(np.zeros((4, 4), bool)) is None


def test_unknown_directory_is_rejected_before_anything_is_written(published: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, [str(published / "pets"), str(published), "--to", str(tmp_path / "made")])
    assert result.exit_code == 2
    assert "is not a known dataset; expected one of Imagenette (train/n01440764/)" in result.output
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("broken", ["images/Abyssinian_test.jpg", "annotations/test.txt"])
def test_unreadable_file_is_named_and_nothing_is_written_for_it(broken: str, published: Path, tmp_path: Path) -> None:
    path = published / "pets" / broken
    path.unlink()
    result = CliRunner().invoke(APP, [str(published / "pets"), "--to", str(tmp_path / "made")])
    assert result.exit_code == 2
    assert path.name in result.output.replace("\n", "")
    assert [one.name for one in (tmp_path / "made").iterdir()] == ["pets-160-train.parquet"]
