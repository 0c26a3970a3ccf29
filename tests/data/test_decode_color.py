"""Valid color profiles are applied; otherwise the image is read unchanged."""

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from vitrail.data import read_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
D50 = (0.9642, 1.0, 0.8249)
PRIMARIES = {"r": (0.4361, 0.2225, 0.0139), "g": (0.3851, 0.7169, 0.0971), "b": (0.1431, 0.0606, 0.7141)}  # sRGB's


def fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + fixed(*values)


def gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def profile(space: bytes, tags: dict[str, bytes]) -> bytes:
    """A small display profile, made by hand."""
    tags = {"wtpt": xyz(*D50), "cprt": b"text\0\0\0\0none\0\0\0\0", **tags}
    table, body, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name.encode() + struct.pack(">II", start + len(body), len(data))
        body += data
    content = struct.pack(">I", len(tags)) + table + body
    header = struct.pack(">I4sI4s4s4s", 128 + len(content), b"\0" * 4, 0x02400000, b"mntr", space, b"XYZ ")
    header += b"\0" * 12 + b"acsp" + b"\0" * 28 + fixed(*D50)
    return header.ljust(128, b"\0") + content


def rgb_profile(order: str = "rgb", power: float = 2.2) -> bytes:
    """Return a profile whose channels are permuted by ``order``."""
    tags = {f"{stored}XYZ": xyz(*PRIMARIES[meant]) for stored, meant in zip("rgb", order, strict=True)}
    return profile(b"RGB ", tags | {f"{stored}TRC": gamma(power) for stored in "rgb"})


def grey_profile(power: float) -> bytes:
    return profile(b"GRAY", {"kTRC": gamma(power)})


SWAPPED = rgb_profile("grb")


def read(path: Path, image: Image.Image, **options: object) -> np.ndarray:
    image.save(path, **options)
    decoded = read_image(path)
    assert decoded.mode == "RGB"
    assert "icc_profile" not in decoded.info
    return np.asarray(decoded).astype(int)


def near(pixel: np.ndarray, color: tuple[int, int, int], by: int = 3) -> bool:
    return bool(np.abs(pixel - np.array(color)).max() <= by)


@pytest.mark.parametrize("suffix", ["png", "tif", "jpg", "webp"])
def test_colors_are_as_intended(tmp_path: Path, suffix: str) -> None:
    image = Image.new("RGB", (8, 8), RED)
    options = {"lossless": True} if suffix == "webp" else {}
    values = read(tmp_path / f"a.{suffix}", image, icc_profile=SWAPPED, **options)
    assert near(values[4, 4], GREEN)
    assert near(read(tmp_path / f"b.{suffix}", image, **options)[4, 4], RED)


def test_gamma(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2), (55, 55, 55))
    expected = round(255 * (1.055 * (55 / 255) ** (1 / 2.4) - 0.055))  # linear light, as sRGB writes it
    assert near(read(tmp_path / "a.png", image, icc_profile=rgb_profile(power=1.0))[0, 0], (expected,) * 3)
    assert near(read(tmp_path / "b.png", image.convert("L"), icc_profile=grey_profile(1.0))[0, 0], (expected,) * 3)


def test_deep_grays(tmp_path: Path) -> None:
    image = Image.fromarray(np.full((2, 2), 55 * 257, dtype=np.uint16))
    assert read(tmp_path / "a.png", image)[0, 0].tolist() == [55] * 3
    assert read(tmp_path / "b.png", image, icc_profile=grey_profile(1.0))[0, 0, 0] == pytest.approx(128, abs=3)


def test_srgb_profiles_change_no_pixel(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert (read(tmp_path / "a.png", Image.fromarray(noise), icc_profile=data) == noise).all()


def test_transparency_stays(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (*RED, 0))
    values = read(tmp_path / "a.png", image, icc_profile=SWAPPED)
    assert near(values[0, 0], GREEN)
    assert values[0, 1].tolist() == list(WHITE)
    values = read(tmp_path / "b.png", Image.new("LA", (1, 1), (55, 0)), icc_profile=grey_profile(1.0))
    assert values[0, 0].tolist() == list(WHITE)


def test_palettes_and_transparent_colors(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([*RED, *BLUE])
    image.putpixel((1, 0), 1)
    values = read(tmp_path / "a.png", image, icc_profile=SWAPPED)
    assert near(values[0, 0], GREEN)
    assert near(values[0, 1], BLUE)
    values = read(tmp_path / "b.png", image, icc_profile=SWAPPED, transparency=1)
    assert near(values[0, 0], GREEN)
    assert values[0, 1].tolist() == list(WHITE)


def test_orientation_and_profile_together(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (4, 2), RED)
    image.paste(BLUE, (0, 0, 2, 2))
    values = read(tmp_path / "a.png", image, exif=exif, icc_profile=SWAPPED)
    assert values.shape == (4, 2, 3)
    assert near(values[0, 0], BLUE)
    assert near(values[3, 0], GREEN)


@pytest.mark.parametrize(
    "data", [b"no profile", SWAPPED[:100], SWAPPED[:200] + b"\xff" * 100, grey_profile(1.0), profile(b"CMYK", {}), b""]
)
def test_other_profiles_are_ignored(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path / "a.png", Image.new("RGB", (2, 2), RED), icc_profile=data)[0, 0].tolist() == list(RED)


def test_cmyk_with_the_profile_of_another_kind_of_image(tmp_path: Path) -> None:
    image = Image.new("CMYK", (2, 1), (0, 255, 255, 0))
    assert read(tmp_path / "a.tif", image, icc_profile=SWAPPED)[0, 0].tolist() == list(RED)
