"""One picture with what is known about it, and where such pictures come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from vitrail.errors import ImageError

UNKNOWN = 255
"""What a mask says of a pixel that is neither foreground nor background, or of which nothing is known."""

Box = tuple[float, float, float, float]


class Sample(NamedTuple):
    """One picture, and what is known about it.

    Attributes:
        picture: the picture, in RGB.
        name: what to call it.
        label: its class.
        mask: (H, W) in uint8: 1 foreground, 0 background, 255 unknown.
        boxes: around each object, (x0, y0, x1, y1) in pixels of the picture.
    """

    picture: Image.Image
    name: str
    label: int | None = None
    mask: np.ndarray | None = None
    boxes: tuple[Box, ...] | None = None


class Source(Protocol):
    """Where the pictures of a collection come from: names and classes by row, and each picture when it is read."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def labels(self) -> Sequence[int | None]: ...
    @property
    def label_names(self) -> tuple[str, ...] | None: ...
    @property
    def has_masks(self) -> bool: ...
    @property
    def has_boxes(self) -> bool: ...
    def read(self, row: int) -> Sample: ...


def clean(name: str) -> str:
    """Make a name printable, whatever bytes it came from."""
    text = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def read_boxes(value: Any, size: tuple[int, int], called: str) -> tuple[Box, ...] | None:
    """Read one box of four numbers, or a list of boxes, and cut off what is outside of the picture."""
    if value is None:
        return None
    flat = len(value) == 4 and not any(isinstance(one, list) for one in value)
    made: list[Box] = []
    for box in [value] if flat else value:
        good = isinstance(box, list) and len(box) == 4 and all(isinstance(one, int | float) for one in box)
        x0, y0, x1, y1 = (float(one) for one in box) if good else (math.nan,) * 4
        x0, y0, x1, y1 = max(x0, 0.0), max(y0, 0.0), min(x1, float(size[0])), min(y1, float(size[1]))
        if not (good and x0 < x1 and y0 < y1):
            raise ImageError(
                f"{called}: {str(box)[:80]} is not a box in a picture of {size[0]} × {size[1]} pixels. Expected x0, "
                "y0, x1, y1 in pixels, from the upper left corner to the lower right one."
            )
        made.append((x0, y0, x1, y1))
    return tuple(made)
