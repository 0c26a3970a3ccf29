"""One picture with what is known about it, and where such pictures come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

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
