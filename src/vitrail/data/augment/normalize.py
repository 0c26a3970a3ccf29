"""Bringing values to the scale that a model learns at, channel by channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.data.spec import Preprocessing
from vitrail.errors import InvalidOption


@dataclass(frozen=True)
class Normalising:
    """What a model expects of arrays: the mean and spread of each channel. They are never resized.

    Attributes:
        mean: what is subtracted from each channel, after the scale.
        std: what it is divided by then.
        scale: what values are divided by first: 255 for bytes, 1 for all others.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # lists, as JSON gives them, are welcome
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        right = len(self.mean) == len(self.std) >= 1 and all(map(math.isfinite, (*self.mean, *self.std)))
        if not right or min(self.std) <= 0 or not self.scale > 0:
            raise InvalidOption(
                f"mean={self.mean}, std={self.std}, scale={self.scale}: expected one finite number for each channel, "
                "and a spread and a scale above 0."
            )

    @property
    def size(self) -> tuple[None]:
        """What arrays are resized to: nothing."""
        return (None,)

    @property
    def of_bytes(self) -> bool:
        """Whether it is for bytes."""
        return self.scale != 1

    def __call__(self, values: Tensor) -> Tensor:
        """Normalise a batch (b, C, ...): in float32, of mean 0 and spread 1 if it is as the training data was."""
        with exact(values.device):
            return normalise(values.float() / self.scale if self.of_bytes else values.float(), self.mean, self.std)


Expects = Preprocessing | Normalising
"""What a model expects of a sample: of a picture, or of an array."""


def read_expects(values: Mapping[str, Any]) -> Expects:
    """Read what a model expects, from plain values."""
    return Normalising(**values) if "scale" in values else Preprocessing(**values)


def normalise(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean of each channel of a batch (b, C, ...), and divide by its spread."""
    # Numbers are filled in on the device: a copy from the host would wait for it.
    shape = (1,) * (values.dim() - 2)
    shift, scale = (
        torch.stack([torch.full(shape, one, device=values.device) for one in given])
        for given in (mean, [1 / one for one in std])
    )
    return (values - shift) * scale


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Compute in float32, also within autocast: a byte has 8 bits, and bfloat16 no more."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()
