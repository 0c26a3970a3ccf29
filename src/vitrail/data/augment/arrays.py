"""Augmentation of arrays: shifts, and masked bands, along every axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail._checks import check_choice
from vitrail.data.augment.images import drawn
from vitrail.data.spec import InputSpec

REACH = {"none": 0.0, "light": 1 / 8, "medium": 1 / 8, "strong": 1 / 4}
"""Largest shift and width of a masked band, as shares of an axis."""

MASKING = ("medium", "strong")

DRAWS = 3
"""Random numbers for each axis: shift, width and place of the band. All are drawn at every strength."""


@dataclass(frozen=True)
class ArrayAugment:
    """Prepare a batch of arrays for training: normalize, shift and mask along every axis of space and time.

    What is shifted in or masked becomes the channel's mean, which is zero after normalizing.

    Attributes:
        strength: ``none``; ``light``: shift by up to an eighth of each axis; ``medium``: also mask one band along
            each axis, up to an eighth of it wide (SpecAugment, Park et al., 2019); ``strong``: both up to a quarter.
        spec: mean and standard deviation of each channel.

    Example:
        >>> augment = ArrayAugment("medium", InputSpec.of_arrays((0.0,), (1.0,)))
        >>> augment(torch.randn(4, 1, 16, 24), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 1, 16, 24])
    """

    strength: str
    spec: InputSpec

    def __post_init__(self) -> None:
        check_choice("augment", self.strength, REACH)

    def __call__(
        self, values: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Augment a batch (b, C, ...) to float32; rows and total as for ``Augment``."""
        return self.apply(values, drawn(DRAWS * (values.dim() - 2), values, draw, rows, total))

    def apply(self, values: Tensor, numbers: Tensor) -> Tensor:
        """Augment a batch by numbers from 0 to 1: (b, 3) for each axis, one after the other. Nothing here is random."""
        made = replace(self.spec, axes="").normalize(values)
        if self.strength == "none":
            return self.spec.arranged(made)
        by_axis = [one.unbind(1) for one in numbers.unflatten(1, (-1, DRAWS)).unbind(1)]
        most = [int(length * REACH[self.strength]) for length in made.shape[2:]]
        for axis, ((offset, _, _), reach) in enumerate(zip(by_axis, most, strict=True), start=2):
            made = shift(made, axis, whole_number(offset, -reach, reach))
        for axis, ((_, width, place), reach) in enumerate(zip(by_axis, most, strict=True), start=2):
            if self.strength in MASKING:
                wide = whole_number(width, 0, reach)
                made = mask_band(made, axis, whole_number(place, 0, made.shape[axis] - wide), wide)
        return self.spec.arranged(made)

    def settled(self) -> ArrayAugment:
        """Return the augmentation of the last epochs: none."""
        return replace(self, strength="none")

    def plain(self, values: Tensor) -> Tensor:
        """Prepare a batch for evaluation: normalized."""
        return self.spec.normalize(values)


def whole_number(numbers: Tensor, low: int, high: int | Tensor) -> Tensor:
    """Map numbers (b,) from 0 to 1 to whole ones from low to high, each equally likely."""
    return torch.clamp((numbers * (high - low + 1)).floor().long() + low, max=high)


def shift(values: Tensor, axis: int, by: Tensor) -> Tensor:
    """Shift each sample along an axis by whole steps (b,), towards higher places if positive, filling with zeros."""
    length = values.shape[axis]
    source = torch.arange(length, device=values.device) - by[:, None]
    there = _along(source.clamp(0, length - 1), values, axis).expand(values.shape)
    inside = _along((source >= 0) & (source < length), values, axis)
    return torch.where(inside, values.gather(axis, there), 0.0)


def mask_band(values: Tensor, axis: int, start: Tensor, width: Tensor) -> Tensor:
    """Set a band of each sample along an axis to zero: its start (b,) and width (b,)."""
    place = torch.arange(values.shape[axis], device=values.device) - start[:, None]
    return torch.where(_along((place >= 0) & (place < width[:, None]), values, axis), 0.0, values)


def _along(table: Tensor, values: Tensor, axis: int) -> Tensor:
    """Reshape a table (b, length) to broadcast along an axis of samples."""
    return table.view(len(table), *(-1 if one == axis else 1 for one in range(1, values.dim())))
