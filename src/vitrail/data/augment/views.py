"""Several views of each image, for training without labels: two global crops, and a sheet of four local ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.data.augment.images import Augment
from vitrail.errors import InvalidOption

GLOBAL = 2
"""Number of global crops, which the teacher sees."""


@dataclass(frozen=True)
class Views:
    """Augment each image several times; takes the place of an ``Augment`` in the training loop.

    Local crops have half the height and width, so that four of them fill one sheet of the size of a global crop. All
    views of an image are then one tensor, (views, 3, size, size), and a batch is handled as any other.

    Attributes:
        augment: augmentation of global crops; ``size`` is theirs, ``crop_min`` the smallest share of the image in them.
        sheets: number of sheets of four local crops; 0 for global crops alone.
        small_min, small_max: smallest and largest share of the image in a local crop; with ``crop_min`` about the same
            as the largest, local crops are parts of global ones.

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
                f"sheets={self.sheets} of images of {self.augment.size} pixels: expected 0 or more, of an even size"
            )
        if self.augment.strength in ("none", "flip"):
            raise InvalidOption(
                f"strength={self.augment.strength!r} gives equal views; expected light, medium or strong"
            )
        self._small()

    def __call__(
        self, images: Tensor, draw: torch.Generator, rows: slice | None = None, total: int | None = None
    ) -> Tensor:
        """Return the views (b, views, 3, size, size) of images (b, 3, S, S); the rest as for ``Augment``."""
        found = [self.augment(images, draw, rows, total) for _ in range(GLOBAL)]
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


def split_views(views: Tensor) -> tuple[Tensor, Tensor]:
    """Return global crops (2·b, 3, size, size) and local crops (n·b, 3, size / 2, size / 2), view after view."""
    large, sheets = views[:, :GLOBAL], views[:, GLOBAL:]
    half = views.shape[-1] // 2
    tiles = sheets.unflatten(3, (-1, half)).unflatten(5, (-1, half))  # b, sheet, color, down, y, across, x
    small = tiles.permute(1, 3, 5, 0, 2, 4, 6).flatten(0, 3)
    return large.transpose(0, 1).flatten(0, 1), small
