"""Masks: a class for each pixel of an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.decode import decode_values
from vitrail.data.sample import UNKNOWN
from vitrail.errors import ImageError

TRIMAP = {1: 1, 2: 0, 3: UNKNOWN}
"""Meaning of the values of a trimap."""


@dataclass(frozen=True)
class MaskReader:
    """How the values of mask images are read.

    Attributes:
        classes: number of classes, whose numbers are the values, 255 for unknown pixels; None: every value above 0 is
            foreground.
        trimap: whether values are those of a trimap: 1 foreground, 2 background, 3 unknown.
    """

    classes: int | None = None
    trimap: bool = False

    def read(self, data: bytes, what: str, size: tuple[int, int], where: str) -> np.ndarray:
        """Decode a mask (H, W) in uint8 for an image of a size (width, height)."""
        found = decode_values(data, f"{where}, {what}")
        if found.shape != (size[1], size[0]):
            theirs, ours = " × ".join(map(str, found.shape[::-1])), " × ".join(map(str, size))
            raise ImageError(f"{where}: its {what} has {theirs} pixels, and the image has {ours}")
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
