"""Masks and depth maps: a class, or a depth, for each pixel of an image."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from vitrail.data.decode import decode_values
from vitrail.data.sample import UNKNOWN
from vitrail.errors import ImageError

TRIMAP = {1: 1, 2: 0, 3: UNKNOWN}
"""Meaning of the values of a trimap."""


class PixelReader(ABC):
    """How files that say something of each pixel of an image are read.

    Attributes:
        noun: what such a file is called.
        columns: names of the columns that hold them, the likeliest first.
        arrays: whether files of NumPy arrays (``.npy``) are among them.
    """

    noun: str
    columns: tuple[str, ...]
    arrays = False

    def of_column(self, column: str) -> PixelReader:
        """Return the reader of a column's files."""
        return self

    def read(self, data: bytes, what: str, size: tuple[int, int], where: str) -> np.ndarray:
        """Decode the values (H, W) for an image of a size (width, height)."""
        found = self.decode(data, f"{where}, {what}")
        if found.shape != (size[1], size[0]):
            theirs, ours = " × ".join(map(str, found.shape[::-1])), " × ".join(map(str, size))
            raise ImageError(f"{where}: its {what} has {theirs} pixels, and the image has {ours}")
        return self.meaning(found, what, where)

    def decode(self, data: bytes, name: str) -> np.ndarray:
        """Decode the stored values (H, W) of a file in memory."""
        return decode_values(data, name)

    @abstractmethod
    def meaning(self, found: np.ndarray, what: str, where: str) -> np.ndarray:
        """Return what stored values (H, W) mean."""


@dataclass(frozen=True)
class MaskReader(PixelReader):
    """How the values of mask images are read.

    Attributes:
        classes: number of classes, whose numbers are the values, 255 for unknown pixels; None: every value above 0 is
            foreground.
        trimap: whether values are those of a trimap: 1 foreground, 2 background, 3 unknown.
    """

    classes: int | None = None
    trimap: bool = False

    noun = "mask"
    columns = ("trimap", "mask", "mask_path", "segmentation_mask", "segmentation", "annotation")

    def of_column(self, column: str) -> MaskReader:
        return replace(self, trimap=column == "trimap")

    def meaning(self, found: np.ndarray, what: str, where: str) -> np.ndarray:
        """Return classes in uint8."""
        if self.trimap and self.classes is None:
            mask = np.full(found.shape, UNKNOWN, dtype=np.uint8)
            for value, meaning in TRIMAP.items():
                mask[found == value] = meaning
            return mask
        if self.classes is None:
            return (found > 0).astype(np.uint8)
        wrong = (found != UNKNOWN) & ((found < 0) | (found >= self.classes))
        if wrong.any():
            raise ImageError(
                f"{where}: its {what} has the value {found[wrong][0]}; expected the numbers of {self.classes} classes, "
                f"from 0, and {UNKNOWN} for unknown pixels"
            )
        return found.astype(np.uint8)


FOREGROUND = MaskReader()
"""Masks whose values above 0 are foreground."""


class DepthReader(PixelReader):
    """Depth maps: grayscale images of 8, 16 or 32 bits, or NumPy arrays. Depths that are not above 0 are unknown."""

    noun = "depth map"
    columns = ("depth", "depth_map", "depth_path", "mask")
    arrays = True

    def decode(self, data: bytes, name: str) -> np.ndarray:
        if not data.startswith(np.lib.format.MAGIC_PREFIX):
            return decode_values(data, name)
        try:
            found: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ImageError(f"{name}: not an array, or it is damaged ({error})") from error
        found = found[..., 0] if found.ndim == 3 and found.shape[-1] == 1 else found
        if found.ndim != 2 or found.dtype.kind not in "uif":
            raise ImageError(f"{name}: expected real numbers of shape (H, W); got {found.dtype} of shape {found.shape}")
        return found

    def meaning(self, found: np.ndarray, what: str, where: str) -> np.ndarray:
        """Return depths in float32, NaN where unknown."""
        depths = found.astype(np.float32)
        return np.where(np.isfinite(depths) & (depths > 0), depths, np.float32("nan"))
