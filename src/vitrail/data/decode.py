"""Decode image files: RGB, upright, in sRGB; every kind of bad file raises one clear error."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitrail._arguments import checked
from vitrail._atomic_files import resolved
from vitrail._checks import as_path, shown
from vitrail.errors import ImageError, ImageTooLarge, InvalidOption

MAX_PIXELS = 100_000_000
"""Larger images are refused before they are decoded; a small file can unpack to gigabytes."""

LARGE = 50_000_000
"""Images that take more bytes are decoded one at a time: threads that read ahead would multiply their memory."""

EXTENSIONS = frozenset(
    {
        *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm"),
        *(".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
    }
)
"""File name extensions of images, in folders and shards."""

# Bitmap formats alone: Pillow passes some others to external programs (EPS to Ghostscript).
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_EXPECTED = "expected an image file such as JPEG, PNG, WebP, TIFF, GIF or BMP"

_CMS: Any = ImageCms  # Pillow's types for it differ between its versions

SCALED_MARGIN = 3
"""A scaled JPEG keeps this many times the height and width that it is resized to."""

_scaled_to: ContextVar[tuple[int, int] | None] = ContextVar("scaled_to", default=None)

_NEGLIGIBLE = 2
"""Conversions that change no value by more (of 255) are skipped: they would only round."""


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image file as RGB.

    Grayscale, palette, 16-bit and CMYK images are converted, embedded color profiles and EXIF orientation applied,
    transparent images composed onto white; of an animation the first frame is taken.

    Raises:
        ImageError: the file is missing, a folder, empty, unreadable, damaged, cut off, not an image, or larger than
            ``MAX_PIXELS`` (read from the header, before anything is decoded).

    Example:
        >>> from vitrail.data import samples
        >>> read_image(samples()["chelsea"]).size
        (451, 300)
    """
    return decode_image(as_path("path", path), path)


def decode_image(source: Path | bytes, name: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image file or its bytes, as :func:`read_image` does; ``name`` is used in errors."""
    with _opened(source, name, max_pixels) as image, _alone_if_large(image):
        size = _scaled_to.get()
        if size is not None:
            image.draft(None, (SCALED_MARGIN * size[1], SCALED_MARGIN * size[0]))
        image.load()
        return as_rgb(to_srgb(_to_8_bits(_upright(image))))


@contextmanager
def scaled_decoding(size: tuple[int, int] | None) -> Iterator[None]:
    """Decode JPEGs at 1/2, 1/4 or 1/8 of their size inside a ``with`` block, where they are then resized to a size.

    The decoded image keeps at least three times the larger of height and width. Resized with antialiasing, it differs
    from the whole image's by a mean of about one step of 255, more at hard edges; docs/embedding.md has figures. Other
    formats decode as always.
    """
    token = _scaled_to.set(None if size is None else (max(size), max(size)))
    try:
        yield
    finally:
        _scaled_to.reset(token)


def decode_values(data: bytes, name: str) -> np.ndarray:
    """Decode the stored values (H, W) of an image in memory, such as a mask.

    Palette images give their indices, color images the largest channel; nothing is rotated or scaled.
    """
    with _opened(data, name) as image, _alone_if_large(image):
        image.load()
        values = np.asarray(image)
    if values.ndim == 3:
        values = values[..., : 3 if values.shape[-1] > 2 else 1].max(-1)  # without alpha
    return values


def check_image(path: str | os.PathLike[str]) -> int:
    """Check an image file, mostly by its header, and return its number of frames or pages; raise as `read_image` does.

    Much faster than decoding; some damage shows only when every pixel is decoded.
    """
    path = as_path("path", path)
    with _opened(path, path) as image:
        try:  # further images in a photograph (MPO: a preview, a depth map) do not count
            frames = int(getattr(image, "n_frames", 1)) if image.format != "MPO" else 1
        except Exception:  # a later frame is damaged; the first may be good
            frames = 1
    try:
        with _opened(path, path) as image:
            image.verify()
    except ImageError:  # a wrong checksum may not matter: decoding decides
        read_image(path)
    return frames


TEXT = {".txt", ".json", ".jsonl", ".yaml", ".yml", ".xml", ".html", ".md"}
"""Endings of files that are named by mistake instead of images; their content is not looked at."""


@checked
def find_images(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    extensions: Collection[str] = EXTENSIONS,
    noun: str = "image",
) -> list[Path]:
    """Find image files: each file as given, and the images in each folder and its subfolders, sorted.

    In folders only files with a known extension count, and hidden files and folders are skipped. A file that is
    reached twice is listed once. No images at all are an ``ImageError``. Other ``extensions`` find other files.
    """
    if not isinstance(paths, str | os.PathLike | list | tuple | set | frozenset | Iterator):
        raise InvalidOption(f"paths={shown(paths)}: expected a path, or a list of paths")
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    given = [as_path("path", path) for path in several]
    found: dict[Path, Path] = {}
    for path in given:
        if not path.exists():
            raise _missing(path, "" if noun == "image" else f"a {noun}")
        if path.suffix.lower() in TEXT and path.is_file():
            raise ImageError(
                f"{path} is a file of text, not of {noun}s; expected {noun} files, a folder of class folders, or a "
                "parquet file or dataset with the labels beside them"
            )
        for file in _files_under(path, extensions) if path.is_dir() else [path]:
            found.setdefault(resolved(file), file)
    if not found:
        where = ", ".join(str(path) for path in given) or "nothing"
        raise ImageError(
            f"no {noun}s found (in {where}); expected {noun} files, or folders with files that end in "
            f"{', '.join(sorted(extensions))}"
        )
    return list(found.values())


def has_images(folder: Path, extensions: Collection[str] = EXTENSIONS) -> bool:
    """Return whether a folder or one of its subfolders holds an image, as :func:`find_images` finds them."""
    return next(_files_under(folder, extensions), None) is not None


def read_images(images: Any) -> list[Image.Image]:
    """Return one image or several as RGB images at their own resolution.

    Images are PIL images, paths of files, arrays (H, W, 3) or tensors (3, H, W), as :func:`as_image` takes them.
    """
    several = images if isinstance(images, list | tuple) else [images]
    if not several:
        raise InvalidOption("no images were given; pass one or more PIL images, paths or arrays")
    for image in several:
        if not isinstance(image, Image.Image | str | os.PathLike | np.ndarray | Tensor):
            raise InvalidOption(
                f"expected PIL images, paths of image files, arrays (H, W, 3) or tensors (3, H, W); got "
                f"{type(image).__name__}"
            )
    return [
        read_image(image) if isinstance(image, str | os.PathLike) else as_image(image, f"image {number}")
        for number, image in enumerate(several)
    ]


def center_square(image: Image.Image, size: int) -> Tensor:
    """Return the largest centered square of an image, resized (bicubic, antialiased) to (3, size, size) in uint8."""
    return torch.from_numpy(np.array(center_crop(image, (size, size)))).permute(2, 0, 1).contiguous()


def center_crop(
    image: Image.Image, size: tuple[int, int], how: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """Return the largest centered part of an image of the aspect ratio of (height, width), resized to it."""
    width, height = image.size
    if (height, width) == size:
        return image
    scale = min(width / size[1], height / size[0])
    across, down = size[1] * scale, size[0] * scale
    left, top = (width - across) / 2, (height - down) / 2
    box = (left, top, min(left + across, width), min(top + down, height))
    gap = None if how is Image.Resampling.NEAREST else 3.0
    return image.resize(size[::-1], how, box=box, reducing_gap=gap)


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to RGB: 16-bit gray scaled, transparency composed onto white."""
    if not isinstance(image, Image.Image):
        raise InvalidOption(f"image={shown(image)}: expected a PIL image")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    image = _to_8_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.new("RGBA", rgba.size, "white")
        image.alpha_composite(rgba)
    return image.convert("RGB")


def as_image(value: Any, name: str) -> Image.Image:
    """Convert a PIL image, a tensor or an array to an RGB image.

    Tensors are (C, H, W), arrays (H, W, C) or (H, W), with one or three channels, in bytes or from 0 to 1.
    """
    if isinstance(value, Image.Image):
        return as_rgb(value)
    if isinstance(value, Tensor) and value.dim() == 3:
        value = value.detach().cpu().movedim(0, -1)
        value = (value.float() if value.is_floating_point() else value.byte()).numpy()
    if isinstance(value, np.ndarray) and (value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in (1, 3))):
        if np.issubdtype(value.dtype, np.floating) and bool(((value >= 0) & (value <= 1)).all()):
            value = np.rint(value * 255).astype(np.uint8)
        if value.dtype == np.uint8:
            value = value[..., 0] if value.shape[2:] == (1,) else value
            return Image.fromarray(np.ascontiguousarray(value)).convert("RGB")
    raise ImageError(
        f"{name}: not an image; expected a PIL image, a tensor (3, H, W) or an array (H, W, 3), in bytes or from 0 to "
        "1. Leave out transforms that normalize: that is done here"
    )


_ROWS = 2**22
"""Values that are scaled to 8 bits at once: double precision takes eight bytes for each."""


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale deep gray images to 8 bits: integers from 16 bits, floats from 0 … 1; some rows at a time."""
    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    stored = np.asarray(image)
    top = 1.0 if image.mode == "F" else 65535.0
    low, high = float(stored.min()), float(stored.max())  # NaN spreads to both
    if not (low >= 0 and high <= top):
        raise ImageError(
            f"values from {low:g} to {high:g}; expected 0 (black) to {top:g} (white). Export the image with 8 or 16 "
            "bits"
        )
    scaled, step = np.empty(stored.shape, np.uint8), max(1, _ROWS // max(1, stored.shape[1]))
    for start in range(0, len(stored), step):
        rows = stored[start : start + step].astype(np.float64)
        scaled[start : start + step] = np.rint(rows * (255 / top))
    made = Image.fromarray(scaled)
    made.info |= {name: value for name, value in image.info.items() if name == "icc_profile"}
    return made


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image to sRGB by its embedded ICC profile, if it has a usable one, keeping transparency."""
    data = image.info.pop("icc_profile", None)
    try:
        return _convert(image, data) if data else image
    except Exception:  # an odd profile; the pixels are still good
        return image


def _convert(image: Image.Image, data: bytes) -> Image.Image:
    profile = _CMS.ImageCmsProfile(io.BytesIO(data))
    space = profile.profile.xcolor_space.strip()
    mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}[space]
    if (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and image.mode not in ("1", "L", "LA", "La")):
        return image
    transform = _CMS.buildTransform(
        profile,
        _CMS.createProfile("sRGB"),
        mode,
        "RGB",
        _CMS.Intent.RELATIVE_COLORIMETRIC,
        flags=_CMS.Flags.BLACKPOINTCOMPENSATION,
    )
    if mode != "CMYK" and _changes_nothing(transform, mode):
        return image
    alpha: Image.Image | None = None
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    made: Image.Image = transform.apply(image.convert(mode))
    made.info.pop("icc_profile", None)
    if alpha is not None:
        made.putalpha(alpha)
    return made


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Return whether colors across the space stay as they are: most profiles are sRGB itself."""
    steps = np.arange(0, 256, 17, dtype=np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(steps.size, -1, 3)
    probe = Image.fromarray(colors).convert(mode)
    change = np.asarray(transform.apply(probe), dtype=int) - np.asarray(probe.convert("RGB"), dtype=int)
    return bool(np.abs(change).max() <= _NEGLIGIBLE)


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; broken metadata is ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the metadata parser raises many kinds
        return image


@contextmanager
def _opened(source: Path | bytes, name: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Open an image file or its bytes, and check its size; every error inside becomes an ImageError."""
    if isinstance(source, Path):
        _check_file(source)
    elif not source:
        raise ImageError(f"{name}: the image is empty; {_EXPECTED}. Fetch or export it again")
    with warnings.catch_warnings():  # Pillow warns about odd metadata
        warnings.simplefilter("ignore")
        with _open(name, source if isinstance(source, Path) else io.BytesIO(source), max_pixels) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise _too_large(name, f"{width} × {height} = {width * height / 1e6:.0f} megapixels", max_pixels)
            if (size := width * height * _bytes_per_pixel(image)) > 4 * max_pixels:
                raise _too_large(name, f"{width} × {height}, {size / 1e6:.0f} MB once decoded", max_pixels)
            if width * height == 0:
                raise ImageError(f"{name}: the image has no pixels ({width} × {height}); export it again")
            try:
                yield image
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from error
            except Exception as error:  # decoders raise many kinds: OSError, SyntaxError, struct.error, ...
                raise ImageError(
                    f"{name}: the image is damaged or cut off ({_reason(error)}); fetch or export it again"
                ) from error


_decoding = threading.Lock()
if hasattr(os, "register_at_fork"):  # a worker forked while another thread decodes must not wait for that thread
    os.register_at_fork(after_in_child=_decoding._at_fork_reinit)  # type: ignore[attr-defined]


def _alone_if_large(image: Image.Image) -> AbstractContextManager[Any]:
    """Return a context that only one thread enters, if an image takes much memory."""
    large = image.width * image.height * _bytes_per_pixel(image) > LARGE
    return _decoding if large else nullcontext()


def _bytes_per_pixel(image: Image.Image) -> int:
    """Return the bytes that Pillow takes for a pixel of an image."""
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    if deep:  # read as 16 or 32 bits, and scaled to 8 in double precision
        return 4 if image.mode in ("I", "F") else 2
    return 1 if image.mode in ("1", "L", "P") else 4


def _check_file(path: Path) -> None:
    if not path.exists():
        raise _missing(path)
    if path.is_dir():
        raise ImageError(f"{path}: this is a folder; {_EXPECTED}. Name a file in it, or list it with find_images")
    if not path.is_file():
        raise ImageError(f"{path}: not a regular file; {_EXPECTED}. Save the image to a file first")
    if path.stat().st_size == 0:
        raise ImageError(f"{path}: the file is empty; {_EXPECTED}. Fetch or export it again")


def _open(name: str | os.PathLike[str], file: Path | IO[bytes], max_pixels: int) -> Image.Image:
    """Read the header of an image."""
    Image.init()
    try:
        return Image.open(file, formats=[kind for kind in _FORMATS if kind in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error), max_pixels) from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: not an image, or its header is damaged; {_EXPECTED}. Convert it to one of these first"
        ) from error
    except PermissionError as error:
        raise ImageError(f"{name}: permission denied; change the file's permissions") from error
    except Exception as error:  # header parsers raise many kinds
        raise ImageError(
            f"{name}: could not be opened as an image ({_reason(error)}); {_EXPECTED}. Fetch or export it again"
        ) from error


def _files_under(folder: Path, extensions: Collection[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ImageError(
            f"{error.filename}: the folder cannot be listed ({_reason(error)}); change its permissions, or name its "
            "files"
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in extensions:
                yield Path(place, name)


def _missing(path: Path, expected: str = "") -> ImageError:
    return ImageError(
        f"{path}: there is no such file; {f'expected {expected}' if expected else _EXPECTED}. Check the path"
    )


def _too_large(name: str | os.PathLike[str], size: str, max_pixels: int) -> ImageTooLarge:
    return ImageTooLarge(
        f"{name}: the image is too large ({size}); expected at most {max_pixels / 1e6:g} megapixels. Scale it down"
    )


def _reason(error: BaseException) -> str:
    """Return the reason of an error in a few words, without the path."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0].strip() if text.strip() else type(error).__name__
