"""Augmentation of arrays, the same along every axis: shifted, and hidden in bands; a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.data.augment.images import drawn
from vitrail.data.augment.normalize import Normalising
from vitrail.errors import InvalidOption

REACH = {"none": 0.0, "light": 1 / 8, "medium": 1 / 8, "strong": 1 / 4}
"""How far along each axis a sample is shifted at most, and how wide a band is, as shares of the axis."""

HIDING = ("medium", "strong")

DRAWS = 3
"""Numbers for each axis: of the shift, and of the band's width and place. All are drawn at every strength."""


@dataclass(frozen=True)
class ArrayAugment:
    """Prepares a batch of arrays for training: normalises, and shifts and hides along every axis of space and time.

    What is shifted in or hidden becomes the channel's mean, which is zero after normalising.

    Attributes:
        strength: ``none``; ``light``: shifted by up to an eighth of each axis; ``medium``: and one band hidden along
            each axis, up to an eighth of it wide (as SpecAugment does, Park et al., 2019); ``strong``: both up to a
            quarter.
        normalising: mean and spread of each channel.

    Example:
        >>> augment = ArrayAugment("medium", Normalising((0.0,), (1.0,)))
        >>> augment(torch.randn(4, 1, 16, 24), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 1, 16, 24])
    """

    strength: str
    normalising: Normalising

    def __post_init__(self) -> None:
        if self.strength not in REACH:
            raise InvalidOption(f"augment={self.strength!r}: arrays know {', '.join(REACH)}.")

    def __call__(
        self, values: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Augment a batch (b, C, ...) to float32; rows and total as in ``Augment``."""
        return self.apply(values, drawn(DRAWS * (values.dim() - 2), values, draw, rows, total))

    def apply(self, values: Tensor, numbers: Tensor) -> Tensor:
        """Augment a batch by numbers from 0 to 1: (b, 3) for each axis, one after the other. Nothing here is random."""
        made = self.plain(values)
        if self.strength == "none":
            return made
        by_axis = numbers.unflatten(1, (-1, DRAWS)).unbind(1)
        for axis, (offset, _, _) in enumerate((one.unbind(1) for one in by_axis), start=2):
            made = shifted(made, axis, spread_over(offset, -self._most(made, axis), self._most(made, axis)))
        for axis, (_, width, place) in enumerate((one.unbind(1) for one in by_axis), start=2):
            if self.strength in HIDING:
                wide = spread_over(width, 0, self._most(made, axis))
                made = hidden(made, axis, spread_over(place, 0, made.shape[axis] - wide), wide)
        return made

    def settled(self) -> ArrayAugment:
        """Give the same for arrays as evaluation shows them."""
        return replace(self, strength="none")

    def plain(self, values: Tensor) -> Tensor:
        """Prepare a batch for evaluation: normalised, and nothing else."""
        return self.normalising(values)

    def _most(self, values: Tensor, axis: int) -> int:
        return int(values.shape[axis] * REACH[self.strength])


def spread_over(numbers: Tensor, low: int, high: int | Tensor) -> Tensor:
    """Turn numbers (b,) from 0 to 1 into whole ones from the lowest to the highest, each as likely as any other."""
    return torch.clamp((numbers * (high - low + 1)).floor().long() + low, max=high)


def shifted(values: Tensor, axis: int, by: Tensor) -> Tensor:
    """Shift each sample along an axis by whole steps (b,), to higher places if above 0; what comes in is zero."""
    length = values.shape[axis]
    source = torch.arange(length, device=values.device) - by[:, None]
    there = _along(source.clamp(0, length - 1), values, axis).expand(values.shape)
    inside = _along((source >= 0) & (source < length), values, axis)
    return torch.where(inside, values.gather(axis, there), 0.0)


def hidden(values: Tensor, axis: int, start: Tensor, width: Tensor) -> Tensor:
    """Set a band of each sample to zero: from a place (b,) along an axis on, so many (b,) steps wide."""
    place = torch.arange(values.shape[axis], device=values.device) - start[:, None]
    return torch.where(_along((place >= 0) & (place < width[:, None]), values, axis), 0.0, values)


def _along(table: Tensor, values: Tensor, axis: int) -> Tensor:
    """Lay a table (b, length) along an axis of samples."""
    return table.view(len(table), *(-1 if one == axis else 1 for one in range(1, values.dim())))
