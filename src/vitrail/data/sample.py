"""One sample of a dataset, and batches of them."""

from __future__ import annotations

import warnings
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

UNKNOWN = 255
"""Value of mask pixels that are neither foreground nor background."""

UNLABELED = -1
"""Label of a sample that has none."""

Box = tuple[float, float, float, float]


class Sample(NamedTuple):
    """One image (or array) with its annotations.

    Attributes:
        image: the image in RGB; for arrays a tensor (C, ...).
        name: name shown to the user.
        label: class number in the dataset's first label column; None without one.
        mask: (H, W) in uint8: class numbers, by default 1 foreground and 0 background, and 255 unknown.
        boxes: (x0, y0, x1, y1) around each object, in pixels of the image.
        labels: class number by label column, for the columns that label this sample; the value of a regression, and
            the class numbers of several classes.
    """

    image: Image.Image | Any
    name: str
    label: int | None = None
    mask: np.ndarray | None = None
    boxes: tuple[Box, ...] | None = None
    labels: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default is never changed)

    @property
    def picture(self) -> Image.Image:
        """Deprecated name of ``image``."""
        warnings.warn("Sample.picture is deprecated; use Sample.image", DeprecationWarning, stacklevel=2)
        return self.image


class Batch(NamedTuple):
    """Preprocessed samples with their annotations.

    Attributes:
        images: (B, C, H, W) in float32.
        indices: position of each sample in the dataset.
        names: name of each.
        labels: (B,) in int64, -1 for samples without a label; None if the dataset has no labels.
        masks: (B, H, W) in uint8, resized as the images are; all 255 for samples without a mask.
        boxes: boxes of each sample, in pixels of the resized images.
    """

    images: Tensor
    indices: tuple[int, ...]
    names: tuple[str, ...]
    labels: Tensor | None = None
    masks: Tensor | None = None
    boxes: list[tuple[Box, ...]] | None = None


class TensorSpec(NamedTuple):
    """Shape and dtype of one sample as a tensor.

    Attributes:
        shape: channels, then height and width, or time, height and width.
        dtype: ``torch.uint8``, or a floating point dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.shape[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All axes but the channels."""
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        """Size of a sample in bytes."""
        return prod(self.shape) * self.dtype.itemsize
