"""Several views of each picture, for learning without labels: two large crops, and a sheet of four small ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.data.augment.images import Augment
from vitrail.errors import InvalidOption

LARGE = 2
"""Views that show much of a picture; what the teacher sees."""


@dataclass(frozen=True)
class Views:
    """Augments each picture several times, and takes the place of an ``Augment`` in the loop.

    Small views have half the height and width, so four of them fill one sheet as large as a large view. All views of
    a picture are then one tensor, (views, 3, size, size), and a batch is cut, moved and kept as any other.

    Attributes:
        augment: of large views; its ``size`` is theirs, its ``crop_min`` the least share of the picture they show.
        sheets: how many sheets of four small views; 0 for large views alone.
        small_min: least share of the picture that a small view shows.
        small_max: most share; with ``crop_min`` at about the same, small views are parts of what large ones show.

    Example:
        >>> views = Views(Augment("medium", 32, crop_min=0.4))
        >>> views(torch.zeros(4, 3, 40, 40, dtype=torch.uint8), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 3, 32, 32])
    """

    augment: Augment
    sheets: int = 1
    small_min: float = 0.08
    small_max: float = 0.4

    def __post_init__(self) -> None:
        if self.sheets < 0 or (self.sheets and self.augment.size % 2):
            raise InvalidOption(
                f"sheets={self.sheets} of pictures of {self.augment.size} pixels: expected 0 or more, of an even size"
            )
        if self.augment.strength in ("none", "flip"):
            raise InvalidOption(
                f"strength={self.augment.strength!r} gives views that are all alike; expected light, medium or strong"
            )
        self._small()

    def __call__(
        self, images: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Give the views (b, views, 3, size, size) of pictures (b, 3, S, S); the rest as for ``Augment``."""
        found = [self.augment(images, draw, rows, total) for _ in range(LARGE)]
        small = self._small()
        for _ in range(self.sheets):
            tiles = [small(images, draw, rows, total) for _ in range(4)]
            found.append(torch.cat([torch.cat(tiles[:2], 3), torch.cat(tiles[2:], 3)], 2))
        return torch.stack(found, 1)

    def plain(self, images: Tensor) -> Tensor:
        """Prepare a batch for evaluation."""
        return self.augment.plain(images)

    def _small(self) -> Augment:
        return replace(
            self.augment, size=self.augment.size // 2, crop_min=self.small_min, crop_max=self.small_max, erasing=0.0
        )


def take_apart(views: Tensor) -> tuple[Tensor, Tensor]:
    """Give large views (2·b, 3, size, size) and small ones (n·b, 3, size / 2, size / 2), one view after the other."""
    large, sheets = views[:, :LARGE], views[:, LARGE:]
    half = views.shape[-1] // 2
    tiles = sheets.unflatten(3, (-1, half)).unflatten(5, (-1, half))  # b, sheet, colour, down, y, across, x
    small = tiles.permute(1, 3, 5, 0, 2, 4, 6).flatten(0, 3)
    return large.transpose(0, 1).flatten(0, 1), small
