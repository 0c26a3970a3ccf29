"""Contact sheets and the sample images."""

import numpy as np
import pytest
from PIL import Image

import vitrail.data
from vitrail.data import read_image, samples
from vitrail.drawing import contact_sheet
from vitrail.drawing.sheet import PAPER
from vitrail.errors import InvalidOption


def test_images_are_side_by_side_at_their_own_resolution() -> None:
    first, second = Image.new("RGB", (100, 50), "red"), Image.new("RGB", (100, 50), "blue")
    sheet = contact_sheet([first, second])
    assert sheet.size == (4 + 100 + 4 + 100 + 4, 4 + 50 + 4)
    pixels = np.asarray(sheet)
    assert (pixels[4:54, 4:104] == (255, 0, 0)).all()
    assert (pixels[4:54, 108:208] == (0, 0, 255)).all()
    assert (pixels[:, 104:108] == PAPER).all()


def test_columns_make_rows() -> None:
    images = [Image.new("RGB", (100, 50), (index, 0, 0)) for index in range(1, 4)]
    sheet = contact_sheet(images, columns=2)
    assert sheet.size == (4 + 2 * 104, 4 + 2 * 54)
    assert sheet.getpixel((5, 59)) == (3, 0, 0)
    assert sheet.getpixel((150, 80)) == PAPER


def test_captions_and_title_are_written_outside_the_images() -> None:
    images = [Image.new("RGB", (200, 100), "red")] * 2
    bare = contact_sheet(images)
    sheet = contact_sheet(images, ["one", "two"], title="both")
    assert sheet.height > bare.height
    pixels = np.asarray(sheet)
    red = (pixels == (255, 0, 0)).all(-1)
    assert red.sum() == 2 * 200 * 100
    top, bottom = np.flatnonzero(red.any(1))[[0, -1]]
    assert (pixels[:top] != PAPER).any()
    assert (pixels[bottom + 1 :, :200] != PAPER).any()
    assert (pixels[bottom + 1 :, 210:] != PAPER).any()


def test_smaller_images_are_centered() -> None:
    sheet = contact_sheet([Image.new("RGB", (100, 100)), Image.new("RGB", (20, 40), "red")])
    ys, xs = np.nonzero((np.asarray(sheet) == (255, 0, 0)).all(-1))
    assert (ys.min(), ys.max(), xs.min(), xs.max()) == (4 + 30, 4 + 69, 108 + 40, 108 + 59)


def test_wrong_sheets_are_errors() -> None:
    image = Image.new("RGB", (9, 9))
    with pytest.raises(InvalidOption, match="0 images"):
        contact_sheet([])
    with pytest.raises(InvalidOption, match="2 images and 1 captions"):
        contact_sheet([image, image], ["only one"])
    with pytest.raises(InvalidOption, match="columns=0"):
        contact_sheet([image], columns=0)


def test_samples_are_shipped_with_their_sources() -> None:
    found = samples()
    assert {name: read_image(path).size for name, path in found.items()} == {
        "astronaut": (512, 512),
        "chelsea": (451, 300),
        "coffee": (600, 400),
    }
    sources = (found["coffee"].parent / "SOURCES.md").read_text(encoding="utf-8")
    assert all(path.name in sources for path in found.values())
    assert sum(path.stat().st_size for path in found.values()) < 360_000


def test_public_names_are_resolved_late() -> None:
    for name in vitrail.data.__all__:
        assert getattr(vitrail.data, name) is not None
    assert set(vitrail.data.__all__) <= set(dir(vitrail.data))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.data.nothing
