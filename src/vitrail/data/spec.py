"""What a model expects of a picture, and pictures made so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vitrail.errors import InvalidOption, UnsupportedInput

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitrail.data.sample import Box

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and spread of ImageNet's colours, which many models are trained with."""


class Batch(NamedTuple):
    """Pictures made ready for a model, and what is known about each.

    Attributes:
        images: (B, 3, H, W) in float32.
        indices: where each is in the data.
        names: what to call each.
        labels: (B,) in int64, -1 where a picture has none; None if no picture of the data has one.
        masks: (B, H, W) in uint8, resized as the images are; all 255 where a picture has none.
        boxes: of each picture, in pixels of the images; empty where a picture has none.
    """

    images: Tensor
    indices: tuple[int, ...]
    names: tuple[str, ...]
    labels: Tensor | None = None
    masks: Tensor | None = None
    boxes: list[tuple[Box, ...]] | None = None


@dataclass(frozen=True)
class InputSpec:
    """Input specification of a model: modality, shape, and statistics of each channel.

    Attributes:
        size: height and width in pixels; frames, height and width for video; frequency bins and frames for audio.
        mean: value subtracted from each channel, on a scale of 0 to 1 for images.
        std: value that each channel is divided by afterwards.
        modality: ``"image"``, ``"video"`` or ``"audio"``.
        argument: name of the model's argument that takes the input.
    """

    size: tuple[int, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    modality: str = "image"
    argument: str = "x"

    def __post_init__(self) -> None:
        axes = 3 if self.modality == "video" else 2
        if len(self.size) != axes or any(isinstance(n, bool) or int(n) != n or n < 1 for n in self.size):
            raise InvalidOption(
                f"size={self.size!r}: expected {axes} whole numbers above 0, like (224, 224) for images"
            )
        channels = 3 if self.modality == "image" else len(self.mean)
        if len(self.mean) != channels or not all(math.isfinite(value) for value in self.mean):
            raise InvalidOption(f"mean={self.mean!r}: expected one finite number for each of {channels} channels")
        if len(self.std) != channels or not all(math.isfinite(value) and value > 0 for value in self.std):
            raise InvalidOption(f"std={self.std!r}: expected one number above zero for each of {channels} channels")
        for name, kind in (("size", int), ("mean", float), ("std", float)):  # lists and numpy numbers are accepted
            object.__setattr__(self, name, tuple(kind(value) for value in getattr(self, name)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis: (channels, *size)."""
        return (len(self.mean), *self.size)


Preprocessing = InputSpec


def to_tensor(pictures: Sequence[Image.Image], preprocessing: Preprocessing) -> Tensor:
    """Make pictures into one batch for a model, (B, 3, H, W) in float32.

    The whole picture is resized (bicubic, antialiased) to the model's size and nothing is cropped, so that
    the patch grid covers the whole picture and groups of patches can be painted back onto it.

    Example:
        >>> from PIL import Image
        >>> to_tensor([Image.new("RGB", (300, 200))], Preprocessing((224, 224))).shape
        torch.Size([1, 3, 224, 224])
    """
    import numpy as np
    import torch
    from PIL import Image

    from vitrail.data.decode import as_rgb

    if isinstance(pictures, Image.Image):
        pictures = [pictures]
    if len(pictures) == 0:
        raise UnsupportedInput("No pictures were given: expected at least one. Pass a list of PIL pictures.")
    height, width = preprocessing.size
    arrays = [
        np.asarray(as_rgb(picture).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        for picture in pictures
    ]
    batch = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous() / 255
    mean = torch.tensor(preprocessing.mean).view(3, 1, 1)
    std = torch.tensor(preprocessing.std).view(3, 1, 1)
    return (batch - mean) / std
