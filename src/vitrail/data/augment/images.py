"""Augmentation on the device: a whole batch at once, every number drawn beforehand from one generator.

What DeiT III calls 3-Augment (Touvron et al., ECCV 2022): a random resized crop and a flip; one of grey, solarised or
blurred; a little colour jitter. No more is needed for small sets, and it is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment import color as colouring
from vitrail.data.augment.geometry import crop, random_boxes, turning, warp
from vitrail.data.augment.normalize import exact, normalise
from vitrail.errors import InvalidOption

Strength = Literal["none", "flip", "light", "medium", "strong"]

TRIES = 10
"""Boxes drawn for a crop; the first that fits into the picture is taken."""

BLUR = (0.1 / 224, 2.0 / 224)
"""Least and most width of the blur, as a share of the picture's side."""

JITTER = 0.3
SOLARISE = 128 / 255

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)
STRONG_ERASING = 0.25

TURNED = 0.5
"""How many pictures are turned, slanted and shifted, where any are; and by how much at most."""
ANGLE, SHEAR, SHIFT = math.radians(15), 0.15, 0.1


class Draws(NamedTuple):
    """What was drawn for each picture, from 0 to 1."""

    area: Tensor
    ratio: Tensor
    place: Tensor
    flip: Tensor
    choice: Tensor
    blur: Tensor
    jitter: Tensor
    turned: Tensor
    angle: Tensor
    shear: Tensor
    shift: Tensor
    erased: Tensor
    erased_area: Tensor
    erased_ratio: Tensor
    erased_place: Tensor
    erased_colour: Tensor


WIDTHS = (TRIES, TRIES, 2, 1, 1, 1, 3, 1, 1, 2, 2, 1, TRIES, TRIES, 2, 3)
"""How many numbers each of them takes; all are drawn at every strength, so that runs differ by nothing else."""


@dataclass(frozen=True)
class Augment:
    """Prepares a batch for training: crops, flips, changes colours, and normalises.

    Attributes:
        strength: ``none``; ``flip``; ``light``: a random resized crop and a flip; ``medium``: and one of grey,
            solarised or blurred, and colour jitter; ``strong``: and turned, slanted and shifted, and random erasing.
        size: height and width of the pictures that come out.
        mean: what is subtracted from red, green and blue, on a scale of 0 to 1.
        std: what they are divided by afterwards.
        crop_min: the least share of a picture that a crop takes.
        crop_max: the most.
        ratio: least and most width over height of a crop.
        jitter: most change of brightness, contrast and saturation.
        erasing: share of pictures of which a box is erased; by default none, and a quarter if ``strong``.
        compiled: whether nearly two hundred operations are fused by `torch.compile`, which takes seconds at the first
            batch.

    Example:
        >>> augment = Augment("medium", 32)
        >>> augment(torch.zeros(4, 3, 40, 40, dtype=torch.uint8), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])
    """

    strength: Strength
    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    crop_min: float = 0.08
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    jitter: float = JITTER
    erasing: float | None = None
    crop_max: float = 1.0
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.strength not in get_args(Strength):
            raise InvalidOption(f"strength={self.strength!r}: expected one of {', '.join(get_args(Strength))}.")
        if self.size < 1:
            raise InvalidOption(f"size={self.size}: expected 1 or more pixels.")
        if not 0 < self.crop_min <= self.crop_max <= 1:
            raise InvalidOption(
                f"crop_min={self.crop_min}, crop_max={self.crop_max}: expected shares above 0, up to 1, in this order."
            )
        if not 0 < self.ratio[0] <= 1 <= self.ratio[1]:
            raise InvalidOption(f"ratio={self.ratio}: expected the least, up to 1, and the most, from 1 on.")
        if not 0 <= self.jitter < 1:
            raise InvalidOption(f"jitter={self.jitter}: expected a number from 0, below 1.")
        if self.erasing is not None and not 0 <= self.erasing <= 1:
            raise InvalidOption(f"erasing={self.erasing}: expected a share from 0 to 1.")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InvalidOption(f"mean={self.mean}, std={self.std}: expected three numbers each, and a spread above 0.")

    def __call__(
        self, images: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Augment a batch: (b, 3, S, S) in uint8 to (b, 3, size, size) in float32.

        Args:
            images: the pictures of this process.
            draw: what numbers are drawn from.
            rows: which of the whole batch these pictures are; by default all.
            total: size of the whole batch, over all processes: numbers are drawn for each of its pictures, so that they
                are the same for any number of processes.
        """
        numbers = drawn(sum(WIDTHS), images, draw, rows, total)
        apply = compiled(Augment.apply) if self.compiled else Augment.apply
        with exact(images.device):
            prepared: Tensor = apply(self, images, numbers)
        return prepared

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Augment a batch by numbers that were drawn: (b, 60), from 0 to 1. Nothing here is random."""
        found = Draws(*numbers.split(WIDTHS, 1))
        pictures = self._placed(images.float() / 255, found)
        if self.strength in ("medium", "strong"):
            pictures = self._coloured(pictures.clamp(0, 1), found)
        if self._erased > 0:
            pictures = self._with_holes(pictures, found)
        return normalise(pictures.clamp(0, 1), self.mean, self.std)

    def plain(self, images: Tensor) -> Tensor:
        """Prepare a batch for evaluation: resized (bicubic, antialiased) where it must be, and normalised."""
        with exact(images.device):
            return normalise(self._resized(images.float() / 255).clamp(0, 1), self.mean, self.std)

    def settled(self) -> Augment:
        """Give the same for pictures as evaluation shows them, flipped at most."""
        return replace(self, strength="none" if self.strength == "none" else "flip", erasing=0.0)

    @property
    def _erased(self) -> float:
        return (STRONG_ERASING if self.strength == "strong" else 0.0) if self.erasing is None else self.erasing

    def _resized(self, pictures: Tensor) -> Tensor:
        if pictures.shape[-1] == self.size and pictures.shape[-2] == self.size:
            return pictures
        return F.interpolate(pictures, (self.size, self.size), mode="bicubic", antialias=True)

    def _placed(self, pictures: Tensor, found: Draws) -> Tensor:
        flip = found.flip[:, 0] < 0.5
        if self.strength == "none":
            return self._resized(pictures)
        if self.strength == "flip":
            pictures = self._resized(pictures)
            return torch.where(flip[:, None, None, None], pictures.flip(-1), pictures)
        side = pictures.shape[-1]
        scale = (self.crop_min, self.crop_max)
        start, size = random_boxes(found.area, found.ratio, found.place, side, scale, self.ratio, otherwise=side)
        if self.strength != "strong":
            return crop(pictures, start, size, flip, self.size)
        amount = (found.turned < TURNED).to(found.angle.dtype)
        turns = turning(
            (_signed(found.angle, ANGLE) * amount)[:, 0],
            _signed(found.shear, SHEAR) * amount,
            _signed(found.shift, SHIFT) * amount,
        )
        return warp(pictures, start, size, flip, turns, self.size)

    def _coloured(self, pictures: Tensor, found: Draws) -> Tensor:
        choice = (found.choice * 3)[..., None, None]
        low, high = BLUR[0] * self.size, BLUR[1] * self.size
        sigma = torch.where(found.choice * 3 >= 2, low + (high - low) * found.blur, 0.0)[:, 0]
        pictures = colouring.blur(pictures, sigma)
        pictures = torch.where(choice < 1, colouring.grey(pictures), pictures)
        pictures = torch.where((choice >= 1) & (choice < 2), colouring.solarise(pictures, SOLARISE), pictures)
        return colouring.jitter(pictures, *(1 + _signed(found.jitter, self.jitter)).unbind(1))

    def _with_holes(self, pictures: Tensor, found: Draws) -> Tensor:
        start, size = random_boxes(
            *(found.erased_area, found.erased_ratio, found.erased_place),
            *(self.size, ERASED_AREA, ERASED_RATIO),
            otherwise=0,
        )
        size = torch.where(found.erased < self._erased, size, 0.0)
        return colouring.erase(pictures, start, size, found.erased_colour)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function as `torch.compile` makes it, the same each time."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def drawn(width: int, images: Tensor, draw: torch.Generator, rows: slice | None, total: int | None) -> Tensor:
    """Draw numbers from 0 to 1 for the whole batch, and give those of this process: (b, width)."""
    count = len(images) if total is None else total
    numbers = torch.rand(count, width, generator=draw, device=draw.device)
    numbers = numbers if rows is None else numbers[rows]
    if len(numbers) != len(images):
        raise InvalidOption(
            f"rows={rows}, total={total}: that is {len(numbers)} pictures of the whole batch, and {len(images)} were "
            "given. Expected as many."
        )
    return numbers.to(images.device, non_blocking=True)


def _signed(numbers: Tensor, most: float) -> Tensor:
    return (2 * numbers - 1) * most
