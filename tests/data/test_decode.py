"""Every kind of image becomes the right RGB; every kind of bad file becomes one clear error."""

import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import MAX_PIXELS, as_rgb, read_image, samples
from vitrail.data.decode import center_crop, scaled_decoding
from vitrail.errors import ImageError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def pixels(path: Path) -> list[tuple[int, ...]]:
    image = read_image(path)
    assert image.mode == "RGB"
    return [tuple(pixel) for row in np.asarray(image) for pixel in row]


def png(width: int, height: int, *, kind: int = 2, data: bytes = b"") -> bytes:
    """Return a PNG file with a given header."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


# ---------------------------------------------------------------- good images


def test_grayscale(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 77, 255]], dtype=np.uint8))
    assert pixels(save(tmp_path / "a.png", image)) == [(0, 0, 0), (77, 77, 77), (255, 255, 255)]


def test_black_and_white(tmp_path: Path) -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert pixels(save(tmp_path / "a.png", image)) == [(0, 0, 0), WHITE]


def test_palette(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([*RED, *BLUE])
    assert pixels(save(tmp_path / "a.png", image)) == [BLUE, BLUE]


def test_palette_with_a_transparent_entry_is_blended_with_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([*RED, *BLUE])
    image.putpixel((0, 0), 0)
    assert pixels(save(tmp_path / "a.png", image, transparency=0)) == [WHITE, BLUE]


def test_palette_with_an_alpha_for_each_entry_is_blended_with_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([*RED, *BLUE])
    image.putpixel((0, 0), 0)
    assert pixels(save(tmp_path / "a.png", image, transparency=bytes([255, 0]))) == [RED, WHITE]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    image = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    assert [grey for grey, _, _ in pixels(save(tmp_path / f"a.{suffix}", image))] == [0, 1, 128, 255]


def test_float_gray_runs_from_zero_to_one(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 0.2, 1]], dtype=np.float32))
    assert [grey for grey, _, _ in pixels(save(tmp_path / "a.tif", image))] == [0, 51, 255]


def test_cmyk(tmp_path: Path) -> None:
    image = Image.new("CMYK", (2, 1), (0, 255, 255, 0))
    assert pixels(save(tmp_path / "a.tif", image)) == [RED, RED]


def test_transparency_is_blended_with_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 128, 255)):
        image.putpixel((x, 0), (*RED, alpha))
    clear, half, full = pixels(save(tmp_path / "a.png", image))
    assert clear == WHITE
    assert full == RED
    assert half == (255, 127, 127)


def test_gray_with_alpha_is_blended_with_white(tmp_path: Path) -> None:
    assert pixels(save(tmp_path / "a.png", Image.new("LA", (1, 1), (10, 0)))) == [WHITE]


def test_rgb_with_a_transparent_color_is_blended_with_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), GREEN)
    assert pixels(save(tmp_path / "a.png", image, transparency=RED)) == [WHITE, GREEN]


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_animation_gives_its_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 3), color) for color in (RED, GREEN, BLUE)]
    options = {"lossless": True} if suffix == "webp" else {}
    path = save(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:], **options)
    assert pixels(path) == [RED] * 12


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [[1, 2, 3], [4, 5, 6]]),
        (2, [[3, 2, 1], [6, 5, 4]]),
        (3, [[6, 5, 4], [3, 2, 1]]),
        (4, [[4, 5, 6], [1, 2, 3]]),
        (5, [[1, 4], [2, 5], [3, 6]]),
        (6, [[4, 1], [5, 2], [6, 3]]),
        (7, [[6, 3], [5, 2], [4, 1]]),
        (8, [[3, 6], [2, 5], [1, 4]]),
    ],
)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, expected: list[list[int]]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8))
    decoded = read_image(save(tmp_path / "a.png", image, exif=exif))
    assert np.asarray(decoded)[..., 0].tolist() == expected


def test_orientation_is_applied_to_jpeg_and_not_twice(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = read_image(save(tmp_path / "a.jpg", Image.new("RGB", (8, 4)), exif=exif))
    assert image.size == (4, 8)
    assert read_image(save(tmp_path / "b.jpg", image, exif=image.getexif())).size == (4, 8)


def test_broken_exif_is_ignored(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (2, 1), RED), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    assert pixels(path) == [RED, RED]


def test_metadata_that_cannot_be_parsed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choke(image: Image.Image) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", choke)
    assert pixels(save(tmp_path / "a.png", Image.new("RGB", (2, 1), RED))) == [RED, RED]


def test_path_may_be_a_string(tmp_path: Path) -> None:
    assert read_image(str(save(tmp_path / "a.png", Image.new("RGB", (5, 4))))).size == (5, 4)


def test_the_file_is_closed_and_may_be_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (2, 1), RED))
    image = read_image(path)
    path.write_bytes(b"")
    assert image.getpixel((1, 0)) == RED


def test_rgb_image_is_passed_through_untouched() -> None:
    image = Image.new("RGB", (2, 2))
    assert as_rgb(image) is image


# ---------------------------------------------------------------- bad images


def truncated(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])


def corrupt(path: Path) -> None:
    Image.new("RGB", (64, 64), RED).save(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT") + 4
    data[start : start + 20] = b"\xff" * 20
    path.write_bytes(data)


def out_of_range(path: Path) -> None:
    Image.fromarray(np.array([[-3.0, 500.0]], dtype=np.float32)).save(path, format="TIFF")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "no such file"),
    "folder": (lambda path: path.mkdir(), "this is a folder"),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "text": (lambda path: path.write_text("no image at all, only words"), "not an image"),
    "header cut off": (lambda path: path.write_bytes(png(4, 4)[:20]), "could not be opened as an image"),
    "truncated": (truncated, "damaged or cut off"),
    "corrupt": (corrupt, "damaged or cut off"),
    "no pixel data": (lambda path: path.write_bytes(png(4, 4)), "damaged or cut off"),
    "fifo": (os.mkfifo, "not a regular file"),
    "large": (lambda path: path.write_bytes(png(20_000, 5_001)), "too large"),
    "enormous": (lambda path: path.write_bytes(png(100_000, 100_000)), "too large"),
    "unknown range": (out_of_range, "values from -3 to 500"),
    "PostScript": (
        lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        "not an image",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    make, message = BAD[kind]
    path = tmp_path / "image.png"
    make(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match=message) as caught:
            read_image(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.count(str(path)) == 1
    assert "\n" not in text


def test_size_limit_is_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(MAX_PIXELS // 1000, 1001))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match=r"100000 × 1001 = 100 megapixels.*at most 100 megapixels"):
        read_image(path)


def test_images_up_to_the_limit_are_read_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (4, 3)))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 8)  # Pillow warns from here on, and refuses from 16
    assert read_image(path).size == (4, 3)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (4, 3)))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("PIL.Image.open", refuse)  # permissions do not stop the user that tests may run as
    with pytest.raises(ImageError, match="permission denied"):
        read_image(path)


def test_scaled_decoding_of_jpegs(tmp_path: Path) -> None:
    photo = Image.open(samples()["astronaut"]).convert("RGB").resize((2000, 1500), Image.Resampling.LANCZOS)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    for name, options in (("a.jpg", {}), ("turned.jpg", {"exif": exif})):
        path = save(tmp_path / name, photo, quality=90, **options)
        whole = read_image(path)
        with scaled_decoding((128, 96)):
            part = read_image(path)
        sides = (1000, 750) if name == "a.jpg" else (750, 1000)
        assert part.size == sides
        assert whole.size == (2 * sides[0], 2 * sides[1])
        pair = [np.asarray(center_crop(one, (128, 96)), dtype=int) for one in (whole, part)]
        assert np.abs(pair[0] - pair[1]).mean() < 1
        assert read_image(path).size == whole.size  # outside of the block
    png_file = save(tmp_path / "a.png", photo)
    with scaled_decoding((128, 96)):
        assert read_image(png_file).size == (2000, 1500)
        assert read_image(samples()["chelsea"]).size == (451, 300)  # three times 128 would not be left
