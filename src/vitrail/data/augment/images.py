"""Augmentation of images: 3-Augment of DeiT III (Touvron et al., ECCV 2022).

A random resized crop and a flip; one of grayscale, solarize and blur; a little color jitter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._checks import check, check_choice, check_int, check_share
from vitrail.data.augment.color import blur, erase, gray, jitter, solarize
from vitrail.data.augment.geometry import affine, crop, random_boxes, warp
from vitrail.data.spec import full_precision, normalize
from vitrail.errors import InvalidOption

Strength = Literal["none", "flip", "light", "medium", "strong"]

COLORS = 3
"""Channels of an image; further ones say what is true of its pixels."""

TRIES = 10
"""Boxes drawn for a crop; the first that fits into the image is taken."""

BLUR = (0.1 / 224, 2.0 / 224)
"""Smallest and largest sigma of the blur, as a share of the image's side."""

JITTER = 0.3
SOLARIZE = 128 / 255

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)
STRONG_ERASING = 0.25

WARPED = 0.5
"""Share of images that ``strong`` rotates, shears and shifts; and the largest angle, shear and shift."""
ANGLE, SHEAR, SHIFT = math.radians(15), 0.15, 0.1


DRAWS = {
    "area": TRIES,
    "ratio": TRIES,
    "place": 2,
    "flip": 1,
    "choice": 1,
    "blur": 1,
    "jitter": 3,
    "warped": 1,
    "angle": 1,
    "shear": 2,
    "shift": 2,
    "erased": 1,
    "erased_area": TRIES,
    "erased_ratio": TRIES,
    "erased_place": 2,
    "erased_color": 3,
}
"""How many random numbers an image takes for what; all are drawn at every strength, so that runs differ in nothing
else."""


@dataclass(frozen=True)
class Augment:
    """Prepare a batch for training: crop, flip, change colors, and normalize.

    Attributes:
        strength: ``none``; ``flip``; ``light``: a random resized crop and a flip; ``medium``: also one of
            grayscale, solarize and blur, and color jitter; ``strong``: also rotation, shear, shift and random erasing.
        size: height and width of the result.
        mean, std: values subtracted from red, green and blue, from 0 to 1, and that they are divided by afterwards.
        crop_min, crop_max: smallest and largest share of an image that a crop takes.
        ratio: smallest and largest width over height of a crop.
        jitter: largest change of brightness, contrast and saturation.
        erasing: share of images in which a box is erased; by default none, and a quarter if ``strong``.
        compiled: whether to fuse about two hundred operations by `torch.compile`, which takes seconds at the first
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
        check_choice("strength", self.strength, get_args(Strength))
        check_int("size", self.size)
        if not 0 < self.crop_min <= self.crop_max <= 1:
            raise InvalidOption(
                f"crop_min={self.crop_min}, crop_max={self.crop_max}: expected shares above 0, up to 1, in this order"
            )
        right = 0 < self.ratio[0] <= 1 <= self.ratio[1]
        check("ratio", self.ratio, right, "the smallest, up to 1, and the largest, from 1 on")
        check_share("jitter", self.jitter, one=False)
        check_share("erasing", self.erasing or 0.0)
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InvalidOption(f"mean={self.mean}, std={self.std}: expected three numbers each, and std above 0")

    def __call__(
        self, images: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Augment a batch: (b, 3, S, S) in uint8 to (b, 3, size, size) in float32.

        Numbers are drawn for the global batch of ``total`` images, of which these are some ``rows``, so that they are
        the same for any world size.
        """
        numbers = drawn(sum(DRAWS.values()), images, draw, rows, total)
        apply = compiled(Augment.apply) if self.compiled else Augment.apply
        with full_precision(images.device):
            prepared: Tensor = apply(self, images, numbers)
        return prepared

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Augment a batch by drawn numbers (b, 60), from 0 to 1. Nothing here is random.

        Channels behind the colors are a mask, or the bytes of a depth map: they are cropped, flipped and warped as the
        image is, without mixing of values, and nothing else.
        """
        found = dict(zip(DRAWS, numbers.split([*DRAWS.values()], 1), strict=True))
        if images.shape[1] > COLORS:
            mask = self._cropped(images[:, COLORS:].float(), found, nearest=True)
            return torch.cat([self.apply(images[:, :COLORS], numbers), mask], 1)
        images = self._cropped(images.float() / 255, found)
        if self.strength in ("medium", "strong"):
            images = self._recolored(images.clamp(0, 1), found)
        if self._erased > 0:
            images = self._with_boxes_erased(images, found)
        return normalize(images.clamp(0, 1), self.mean, self.std)

    def plain(self, images: Tensor) -> Tensor:
        """Prepare a batch for evaluation: resized (bicubic, antialiased) where it must be, and normalized.

        Channels behind the colors are resized without mixing of values.
        """
        if images.shape[1] > COLORS:
            return torch.cat(
                [self.plain(images[:, :COLORS]), self._resized(images[:, COLORS:].float(), nearest=True)], 1
            )
        with full_precision(images.device):
            return normalize(self._resized(images.float() / 255).clamp(0, 1), self.mean, self.std)

    def settled(self) -> Augment:
        """Return the augmentation of the last epochs: images as in evaluation, flipped at most."""
        return replace(self, strength="none" if self.strength == "none" else "flip", erasing=0.0)

    @property
    def _erased(self) -> float:
        return (STRONG_ERASING if self.strength == "strong" else 0.0) if self.erasing is None else self.erasing

    def _resized(self, images: Tensor, *, nearest: bool = False) -> Tensor:
        if images.shape[-1] == self.size and images.shape[-2] == self.size:
            return images
        if nearest:
            return F.interpolate(images, (self.size, self.size), mode="nearest-exact")
        return F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)

    def _cropped(self, images: Tensor, found: dict[str, Tensor], *, nearest: bool = False) -> Tensor:
        """Crop, flip and warp images, or with ``nearest`` masks, whose values are not mixed."""
        flip = found["flip"][:, 0] < 0.5
        if self.strength == "none":
            return self._resized(images, nearest=nearest)
        if self.strength == "flip":
            images = self._resized(images, nearest=nearest)
            return torch.where(flip[:, None, None, None], images.flip(-1), images)
        side = images.shape[-1]
        scale = (self.crop_min, self.crop_max)
        start, size = random_boxes(
            found["area"], found["ratio"], found["place"], side, scale, self.ratio, otherwise=side
        )
        if self.strength != "strong":
            return crop(images, start, size, flip, self.size, nearest=nearest)
        amount = (found["warped"] < WARPED).to(found["angle"].dtype)
        angle, shear, shift = (
            _signed(numbers, most) * amount
            for numbers, most in ((found["angle"], ANGLE), (found["shear"], SHEAR), (found["shift"], SHIFT))
        )
        return warp(images, start, size, flip, affine(angle[:, 0], shear, shift), self.size, nearest=nearest)

    def _recolored(self, images: Tensor, found: dict[str, Tensor]) -> Tensor:
        choice = (found["choice"] * 3)[..., None, None]
        low, high = BLUR[0] * self.size, BLUR[1] * self.size
        sigma = torch.where(found["choice"] * 3 >= 2, low + (high - low) * found["blur"], 0.0)[:, 0]
        images = blur(images, sigma)
        images = torch.where(choice < 1, gray(images), images)
        images = torch.where((choice >= 1) & (choice < 2), solarize(images, SOLARIZE), images)
        return jitter(images, *(1 + _signed(found["jitter"], self.jitter)).unbind(1))

    def _with_boxes_erased(self, images: Tensor, found: dict[str, Tensor]) -> Tensor:
        start, size = random_boxes(
            *(found["erased_area"], found["erased_ratio"], found["erased_place"]),
            *(self.size, ERASED_AREA, ERASED_RATIO),
            otherwise=0,
        )
        size = torch.where(found["erased"] < self._erased, size, 0.0)
        return erase(images, start, size, found["erased_color"])


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function, the same each time."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def drawn(width: int, images: Tensor, draw: torch.Generator, rows: slice | None, total: int | None) -> Tensor:
    """Draw numbers from 0 to 1 for the global batch and return those of this rank: (b, width)."""
    count = len(images) if total is None else total
    numbers = torch.rand(count, width, generator=draw, device=draw.device)
    numbers = numbers if rows is None else numbers[rows]
    if len(numbers) != len(images):
        raise InvalidOption(
            f"rows={rows}, total={total}: these are {len(numbers)} rows of the global batch, for {len(images)} images"
        )
    return numbers.to(images.device, non_blocking=True)


def _signed(numbers: Tensor, most: float) -> Tensor:
    return (2 * numbers - 1) * most
