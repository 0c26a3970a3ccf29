"""Mixup and CutMix of neighboring images, and the share of each label that remains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail._checks import check, check_share, is_number
from vitrail.data.augment.color import box_mask
from vitrail.data.augment.images import compiled, drawn
from vitrail.errors import InvalidOption

TABLE = 2048


class Mixed(NamedTuple):
    """Images after mixing.

    Attributes:
        images: (b, ..., H, W).
        partner: (b,) in int64: the image, and so the label, that was mixed in; None if nothing is ever mixed.
        share: (b,) in float32: weight of the image's own label; 1 where it was not mixed.
    """

    images: Tensor
    partner: Tensor | None
    share: Tensor


@dataclass(frozen=True)
class Mix:
    """Mix each image with its neighbor: 0 with 1, 2 with 3, ..., so that pairs stay within a rank.

    Attributes:
        mixup: alpha of the Beta distribution of an image's own share (Zhang et al., 2018); 0 for no Mixup.
        cutmix: alpha of CutMix (Yun et al., 2019), which pastes a box of the other image, in height and width through
            all other axes; 0 for none.
        probability: share of images that are mixed.
        switch: share of those that CutMix is used for, where both are on.
        compiled: as for :class:`~vitrail.data.augment.images.Augment`.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            check(name, alpha, is_number(alpha) and alpha >= 0, "0 (off) or a number above it")
        check_share("probability", self.probability)
        check_share("switch", self.switch)

    @property
    def does_anything(self) -> bool:
        """Whether any image is mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def __call__(
        self, images: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Mixed:
        """Mix a batch (b, ..., H, W); rows and total as in :class:`~vitrail.data.augment.images.Augment`."""
        count = len(images)
        if not self.does_anything:
            return self.idle(images)
        if count % 2 or (rows is not None and (rows.start or 0) % 2):
            raise InvalidOption(f"a batch of {count} images cannot be mixed in pairs; expected an even number")
        numbers = drawn(6, images, draw, rows, total)
        apply = compiled(Mix.apply) if self.compiled else Mix.apply
        shares = [
            beta(numbers[:, place], alpha) if alpha > 0 else torch.ones_like(numbers[:, place])
            for place, alpha in enumerate((self.mixup, self.cutmix))
        ]
        mixed: Mixed = apply(self, images, numbers, torch.stack(shares, 1))
        return mixed

    def idle(self, images: Tensor) -> Mixed:
        """Return a batch unmixed."""
        partner = torch.arange(len(images), device=images.device) if self.does_anything else None
        return Mixed(images, partner, torch.ones(len(images), device=images.device))

    def apply(self, images: Tensor, numbers: Tensor, shares: Tensor) -> Mixed:
        """Mix a batch by numbers (b, 6) from 0 to 1, and the shares (b, 2) that Mixup and CutMix leave of an image."""
        height, width = images.shape[-2:]
        _, _, place_down, place_across, chosen, switched = numbers.unbind(1)
        mixed = chosen < self.probability
        switch = self.switch if self.mixup > 0 and self.cutmix > 0 else float(self.cutmix > 0)
        cut = switched < switch
        start, end = _boxes(shares[:, 1], torch.stack([place_down, place_across], 1), height, width)
        inside = box_mask(start, end, height, width)
        own = torch.where(cut[:, None, None], (~inside).float(), shares[:, 0, None, None])
        own = torch.where(mixed[:, None, None], own, 1.0)
        left = torch.where(cut, 1 - (end - start).prod(1) / (height * width), shares[:, 0])
        others = images.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        partner = torch.arange(len(images), device=images.device) ^ 1
        own = own.unflatten(0, (-1, *[1] * (images.dim() - 3)))  # the same for all axes before the last two
        blended = torch.lerp(others, images, own.to(images.dtype))
        return Mixed(blended, partner, torch.where(mixed, left, 1.0))


def _boxes(shares: Tensor, places: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Place boxes that leave these shares of an image, in whole pixels, clipped at the border."""
    reach = 0.5 * (1 - shares).clamp(min=0).sqrt()
    sides = [torch.full_like(shares, float(side)) for side in (height, width)]
    extent = torch.stack(sides, 1)
    half = (reach[:, None] * extent).floor()
    middle = torch.minimum((places * extent).floor(), extent - 1)
    return (middle - half).clamp(min=0), torch.minimum(middle + half, extent)


def beta(numbers: Tensor, alpha: float) -> Tensor:
    """Map uniform numbers to Beta(alpha, alpha) by the inverse of its cumulative distribution."""
    table = _half(alpha, numbers.device)
    folded = torch.minimum(numbers, 1 - numbers).clamp(min=0) * 2  # the distribution is symmetric
    right = torch.searchsorted(table, folded.contiguous()).clamp(1, TABLE - 1)
    low, high = table[right - 1], table[right]
    place = (right - 1 + (folded - low) / (high - low).clamp(min=1e-12)) / (TABLE - 1)
    found = 0.5 * place.clamp(0, 1) ** max(1 / alpha, 1.0)
    return torch.where(numbers < 0.5, found, 1 - found)


@lru_cache(maxsize=16)
def _half(alpha: float, device: torch.device) -> Tensor:
    """Return the cumulative distribution of the lower half of Beta(alpha, alpha) at x = 0.5 t^p, t from 0 to 1.

    With p = 1 / alpha for alpha < 1, the density in t is finite where that in x is not.
    """
    t = torch.linspace(0, 1, TABLE, dtype=torch.float64)
    power = max(1 / alpha, 1.0)
    density = t ** max(alpha - 1, 0.0) * (1 - 0.5 * t**power) ** (alpha - 1)
    total = torch.cumulative_trapezoid(density, t)
    return torch.cat([torch.zeros(1), total / total[-1]]).float().to(device)
