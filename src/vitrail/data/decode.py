"""Files to pictures, and every kind of bad file to one clear error."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vitrail.data.color_profile import to_srgb
from vitrail.errors import ImageError

MAX_PIXELS = 100_000_000
"""Pictures with more pixels are refused before they are decoded; a small file can unpack to gigabytes."""

EXTENSIONS = frozenset(
    {
        *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm"),
        *(".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
    }
)
"""Which files of a folder are taken for pictures."""

# Only formats of pixels. Pillow would also hand some files to outside programs (EPS to Ghostscript, for one).
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_EXPECTED = "Expected a picture file such as JPEG, PNG, WebP, TIFF, GIF or BMP."


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read a picture file as RGB.

    Greyscale, palette, 16-bit and CMYK pictures are converted, embedded colour profiles applied, transparent
    pictures laid on white, EXIF orientation is applied, and of an animation the first frame is taken.

    Raises:
        ImageError: the file is missing, a folder, empty, unreadable, damaged, cut off, too large (more than
            ``MAX_PIXELS``, known from the header, before anything is decoded), or not a picture.

    Example:
        >>> from vitrail.data import samples
        >>> read_image(samples()["chelsea"]).size
        (451, 300)
    """
    path = Path(path)
    _check_file(path)
    return _read(path, path)


def decode_image(data: bytes, name: str) -> Image.Image:
    """Read a picture that is held in memory, as :func:`read_image` reads a file; ``name`` is what errors call it.

    Raises:
        ImageError: as :func:`read_image` would.
    """
    _check_data(data, name)
    return _read(name, io.BytesIO(data))


def decode_values(data: bytes, name: str) -> np.ndarray:
    """Read a picture that is held in memory for its numbers (H, W), as they are stored: a mask, for one.

    Of a palette the indices are given, and of colours the largest; nothing is turned or scaled.

    Raises:
        ImageError: as :func:`read_image` would.
    """
    _check_data(data, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _open(name, io.BytesIO(data)) as image:
            _check_size(name, image.size)
            try:
                image.load()
                values = np.asarray(image)
            except Exception as error:  # as in _read
                raise _damaged(name, error) from error
    if values.ndim == 3:
        values = values[..., : 3 if values.shape[-1] > 2 else 1].max(-1)  # what is behind them is how opaque it is
    return values


def _read(name: Path | str, file: Path | IO[bytes]) -> Image.Image:
    with warnings.catch_warnings():  # Pillow warns about odd metadata; the picture is either usable or refused
        warnings.simplefilter("ignore")
        image = _open(name, file)
        with image:
            _check_size(name, image.size)
            try:
                image.load()
                return as_rgb(to_srgb(_shallow(_upright(image))))
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from error
            except Exception as error:  # decoders raise whatever they like: OSError, SyntaxError, struct.error, ...
                raise _damaged(name, error) from error


def check_image(path: str | os.PathLike[str]) -> int:
    """Check a picture file, mostly by its header, and give the number of its frames or pages.

    Much quicker than reading it, and finds most of what :func:`read_image` would refuse, but not all: some
    damage shows only when every pixel is decoded.

    Raises:
        ImageError: as :func:`read_image` would.
    """
    path = Path(path)
    _check_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _open(path, path) as image:
            _check_size(path, image.size)
            frames = _frames(image)
        try:
            with _open(path, path) as image:
                image.verify()
        except ImageError:
            raise
        except Exception:  # checksums, where the format has them, are not all needed: reading decides
            read_image(path)
    return frames


def find_images(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Find picture files: each file as given, each folder's pictures in all its subfolders, sorted.

    In folders, only files with a known extension count, and hidden files and folders are skipped. A file that
    is reached twice is listed once.

    Raises:
        ImageError: a path does not exist, a folder cannot be listed, or there is no picture at all.
    """
    given = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    found: dict[Path, Path] = {}
    for path in given:
        if not path.exists():
            raise _missing(path)
        for file in _pictures_under(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    if not found:
        where = ", ".join(str(path) for path in given) or "nothing"
        raise ImageError(
            f"No pictures found (looked at: {where}). Expected picture files, or folders with files that end "
            f"in {', '.join(sorted(EXTENSIONS))}. Name a file or another folder."
        )
    return list(found.values())


def as_rgb(image: Image.Image) -> Image.Image:
    """Make any PIL picture RGB: deep greys scaled, transparency laid on white, everything else converted."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    image = _shallow(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        image = Image.new("RGBA", coloured.size, "white")
        image.alpha_composite(coloured)
    return image.convert("RGB")


def _shallow(image: Image.Image) -> Image.Image:
    """Deep greys to 8 bits: integers are taken for 16-bit ones, and floats for values from 0 to 1."""
    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image, dtype=np.float64)
    top = 1.0 if image.mode == "F" else 65535.0
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= top):
        raise ImageError(
            f"the values run from {values.min():g} to {values.max():g}, and which of them is white is "
            f"not known. Expected 0 (black) to {top:g} (white). Export the picture with 8 or 16 bits."
        )
    made = Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))
    made.info |= {name: value for name, value in image.info.items() if name == "icc_profile"}
    return made


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; metadata too broken to read has none, and the pixels are still good."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the parser of metadata raises whatever it likes
        return image


def _frames(image: Image.Image) -> int:
    """Count frames or pages; the second picture in a photograph's file (a preview, a depth map) is neither."""
    try:
        return 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
    except Exception:  # a damaged later frame; the first one may be good
        return 1


def _check_file(path: Path) -> None:
    if not path.exists():
        raise _missing(path)
    if path.is_dir():
        raise ImageError(f"{path}: this is a folder. {_EXPECTED} Name a file in it, or list it with find_images.")
    if not path.is_file():
        raise ImageError(f"{path}: this is not a regular file. {_EXPECTED} Save the picture to a file first.")
    if path.stat().st_size == 0:
        raise ImageError(f"{path}: the file is empty. {_EXPECTED} Fetch or export it again.")


def _check_data(data: bytes, name: str) -> None:
    if not data:
        raise ImageError(f"{name}: the picture is empty. {_EXPECTED} Fetch or export it again.")


def _open(name: Path | str, file: Path | IO[bytes]) -> Image.Image:
    """Read the header, and refuse what is not a picture."""
    Image.init()
    try:
        return Image.open(file, formats=[kind for kind in _FORMATS if kind in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error)) from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: this is not a picture, or its header is damaged. {_EXPECTED} Convert it to one of these first."
        ) from error
    except PermissionError as error:
        raise ImageError(
            f"{name}: the file may not be read (permission denied). Expected a readable file. Change its permissions."
        ) from error
    except Exception as error:  # header parsers raise whatever they like
        raise ImageError(
            f"{name}: the file could not be opened as a picture ({_reason(error)}). {_EXPECTED} "
            "Fetch or export it again."
        ) from error


def _check_size(name: Path | str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width} × {height} = {width * height / 1e6:.0f} megapixels")
    if width * height == 0:
        raise ImageError(f"{name}: the picture has no pixels ({width} × {height}). {_EXPECTED} Export it again.")


def _pictures_under(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ImageError(
            f"{error.filename}: the folder cannot be listed ({_reason(error)}). Expected a readable folder. "
            "Change its permissions, or name its files."
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in EXTENSIONS:
                yield Path(place, name)


def _missing(path: Path) -> ImageError:
    return ImageError(f"{path}: there is no such file. {_EXPECTED} Check the path for a typing mistake.")


def _damaged(name: Path | str, error: Exception) -> ImageError:
    return ImageError(
        f"{name}: the picture is damaged or cut off ({_reason(error)}). "
        "Expected a complete picture file. Fetch or export it again."
    )


def _too_large(name: Path | str, size: str) -> ImageError:
    return ImageError(
        f"{name}: the picture is too large ({size}). Expected at most {MAX_PIXELS / 1e6:.0f} megapixels. "
        "Scale it down first."
    )


def _reason(error: BaseException) -> str:
    """Say in a few words what went wrong, without the path that the message begins with."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0].strip() if text.strip() else type(error).__name__
