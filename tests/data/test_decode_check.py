"""An image is checked without being decoded, and nothing that can be read is refused."""

import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.data.test_decode import BAD
from vitrail.data import check_image, read_image
from vitrail.errors import ImageError


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "png", "tif", "webp"])
def test_good_images_have_one_frame(tmp_path: Path, suffix: str) -> None:
    Image.new("RGB", (4, 3)).save(tmp_path / f"a.{suffix}")
    assert check_image(tmp_path / f"a.{suffix}") == 1


def test_nothing_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (4, 3)).save(tmp_path / "a.jpg")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    assert check_image(str(tmp_path / "a.jpg")) == 1


@pytest.mark.parametrize("suffix", ["gif", "png", "tif", "webp"])
def test_frames_are_counted(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 3), color) for color in ("red", "green", "blue")]
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:])
    assert check_image(tmp_path / f"a.{suffix}") == 3


def test_a_second_image_in_a_photograph_is_no_frame(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    image.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[image])
    assert check_image(tmp_path / "a.jpg") == 1


def test_a_damaged_later_frame_keeps_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(image: Image.Image) -> int:
        raise EOFError

    Image.new("P", (4, 3)).save(tmp_path / "a.gif")
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.n_frames", property(fail))
    assert check_image(tmp_path / "a.gif") == 1


@pytest.mark.parametrize("kind", sorted(BAD.keys() - {"unknown range"}))
def test_bad_files_get_the_error_that_reading_gives(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image.png"
    BAD[kind][0](path)
    with pytest.raises(ImageError) as reading:
        read_image(path)
    if kind == "no pixel data":  # every checksum is right
        assert check_image(path) == 1
        return
    with pytest.raises(ImageError) as checking:
        check_image(path)
    assert str(checking.value) == str(reading.value)


def test_a_wrong_checksum_alone_is_left_to_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 3), "red").save(path)
    data = path.read_bytes()
    end = data.index(b"IEND")
    body = b"tEXtComment\0odd"
    wrong = zlib.crc32(body) ^ 1
    chunk = (len(body) - 4).to_bytes(4, "big") + body + wrong.to_bytes(4, "big")
    path.write_bytes(data[: end - 4] + chunk + data[end - 4 :])
    with Image.open(path) as image, pytest.raises(Exception, match=r"CRC|broken"):
        image.verify()
    assert read_image(path).getpixel((0, 0)) == (255, 0, 0)
    assert check_image(path) == 1
