"""Input specification of a model, and tensors made to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail._arguments import checked
from vitrail._checks import check, shown
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.sampling import FrameSampling, Spectrogram
from vitrail.errors import InvalidOption, UnsupportedInput

if TYPE_CHECKING:
    from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colors."""


@dataclass(frozen=True)
class InputSpec:
    """Input specification of a model: modality, shape, and statistics of each channel.

    Attributes:
        size: height and width in pixels; frames, height and width for video; frequency bins and frames for audio.
            Arrays are never resized; their size is empty, or that of the model.
        mean: value subtracted from each channel, after dividing by ``scale``.
        std: value that each channel is divided by afterwards.
        modality: ``"image"``, ``"video"``, ``"audio"`` or ``"array"``.
        argument: name of the model's argument that takes the input.
        scale: value that the input is divided by first: 255 for bytes, 1 for floating point arrays.
        sampling: how frames of a video are chosen, or how a spectrogram is computed; by default as `FrameSampling` and
            `Spectrogram` do. None for images and arrays.
        axes: order of the axes that the model takes, if it is not that of its modality: ``"TCHW"`` for frames before
            channels, ``"TF"`` for spectrograms with time first and no channel.
    """

    size: tuple[int, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    modality: str = "image"
    argument: str = "x"
    scale: float = 255.0
    sampling: FrameSampling | Spectrogram | None = None
    axes: str = ""

    def __post_init__(self) -> None:
        check("modality", self.modality, self.modality in MODALITIES, f"one of {', '.join(MODALITIES)}")
        axes = (0, 2, 3) if self.modality == "array" else (len(MODALITIES[self.modality].axes) - 1,)
        sized = len(self.size) in axes and all(not isinstance(n, bool) and int(n) == n >= 1 for n in self.size)
        check("size", self.size, sized, f"{axes[0]} whole numbers above 0, like (224, 224) for images")
        channels = 3 if self.modality == "image" else max(len(self.mean), 1)
        finite = len(self.mean) == channels and all(math.isfinite(value) for value in self.mean)
        check("mean", self.mean, finite, f"one finite number for each of {channels} channels")
        positive = len(self.std) == channels and all(math.isfinite(value) and value > 0 for value in self.std)
        check("std", self.std, positive, f"one number above zero for each of {channels} channels")
        check("scale", self.scale, self.scale > 0, "a number above zero, like 255 for bytes")
        for name, kind in (("size", int), ("mean", float), ("std", float)):  # lists and numpy numbers are accepted
            object.__setattr__(self, name, tuple(kind(value) for value in getattr(self, name)))
        plain = MODALITIES[self.modality].axes
        ordered = sorted(self.axes) in (sorted(plain), sorted(plain.replace("C", "") if len(self.mean) == 1 else plain))
        check("axes", self.axes, not self.axes or ordered, f"the axes of {plain} in the model's order")
        kind_of = MODALITIES[self.modality].sampling
        sampling = kind_of(**self.sampling) if kind_of and isinstance(self.sampling, Mapping) else self.sampling
        right = sampling is None if kind_of is None else sampling is None or isinstance(sampling, kind_of)
        check("sampling", self.sampling, right, f"{kind_of.__name__ if kind_of else None} for {self.modality}")
        object.__setattr__(self, "sampling", kind_of() if kind_of and sampling is None else sampling)

    @classmethod
    def of_arrays(cls, mean: Sequence[float], std: Sequence[float], scale: float = 1.0) -> InputSpec:
        """Return the specification of arrays: statistics of each channel, and no size."""
        return cls((), tuple(mean), tuple(std), "array", scale=scale)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InputSpec:
        """Read a specification from a model's ``labels.json``; entries without a size are those of arrays."""
        return cls(**values) if "size" in values else cls.of_arrays(**values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis: (channels, *size), in the order of ``axes``."""
        shape = (len(self.mean), *self.size)
        plain = MODALITIES[self.modality].axes
        return tuple(shape[plain.index(axis)] for axis in self.axes) if self.axes else shape

    @property
    def is_array(self) -> bool:
        """Whether inputs are arrays (also clips and spectrograms), which are normalized and never resized."""
        return self.modality != "image"

    @property
    def of_bytes(self) -> bool:
        """Whether inputs are bytes, not floating point numbers."""
        return self.scale != 1

    def normalize(self, values: Tensor) -> Tensor:
        """Normalize a batch (B, C, ...) of the input's own size, in float32."""
        with full_precision(values.device):
            made = normalize(values.float() / self.scale if self.of_bytes else values.float(), self.mean, self.std)
        return self.arranged(made)

    __call__ = normalize

    def arranged(self, values: Tensor) -> Tensor:
        """Return a batch (B, C, ...) with its axes in the model's order."""
        if not self.axes:
            return values
        plain = MODALITIES[self.modality].axes
        if "C" not in self.axes:
            values, plain = values[:, 0], plain.replace("C", "")
        return values.permute(0, *(plain.index(axis) + 1 for axis in self.axes))

    def plain(self, values: Tensor) -> Tensor:
        """Return a batch in the model's order as (B, C, ...): the inverse of :meth:`arranged`."""
        if not self.axes:
            return values
        plain = MODALITIES[self.modality].axes
        values, axes = (values, self.axes) if "C" in self.axes else (values[:, None], f"C{self.axes}")
        return values.permute(0, *(axes.index(axis) + 1 for axis in plain))


@checked
def to_tensor(images: Sequence[Image.Image], spec: InputSpec) -> Tensor:
    """Convert images to one batch for a model, (B, 3, H, W) in float32.

    The whole image is resized (bicubic, antialiased) and nothing is cropped: the patch grid covers the whole image, so
    that groups of patches can be painted back onto it.

    Example:
        >>> from PIL import Image
        >>> to_tensor([Image.new("RGB", (300, 200))], InputSpec((224, 224))).shape
        torch.Size([1, 3, 224, 224])
    """
    import numpy as np
    from PIL import Image

    from vitrail.data.decode import as_rgb

    if isinstance(images, Image.Image):
        images = [images]
    if not isinstance(images, list | tuple):
        raise InvalidOption(f"images={shown(images)}: expected a list of PIL images")
    if len(images) == 0:
        raise UnsupportedInput("no images were given; pass a list of one or more PIL images")
    height, width = spec.size
    size = (width, height)
    arrays = [np.asarray(as_rgb(one).resize(size, Image.Resampling.BICUBIC), dtype=np.float32) for one in images]
    batch = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous() / 255
    return (batch - torch.tensor(spec.mean).view(3, 1, 1)) / torch.tensor(spec.std).view(3, 1, 1)


def normalize(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean of each channel of a batch (B, C, ...) and divide by its standard deviation."""
    # Filled in on the device: a copy from the host would synchronize.
    shape = (1,) * (values.dim() - 2)
    shift, scale = (
        torch.stack([torch.full(shape, one, device=values.device) for one in given])
        for given in (mean, [1 / one for one in std])
    )
    return (values - shift) * scale


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast: bfloat16 has 8 significant bits, no more than a byte."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()
