"""Dense heads: segmentation, depth or other values for each pixel."""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads.pooling import check_size, linear
from vitrail.tokens import TokenLayout

DenseKind = Literal["segmentation", "depth", "regression"]


class DenseHead(nn.Module):
    """A linear layer on each patch, and bilinear interpolation to pixels.

    Args:
        width: channels of a token.
        classes: channels of the map.
        kind: ``segmentation`` for logits, ``regression`` for plain values, ``depth`` for positive values (softplus
            before the interpolation).
    """

    def __init__(self, width: int, classes: int, kind: DenseKind = "segmentation") -> None:
        super().__init__()
        if kind not in get_args(DenseKind):
            raise InvalidOption(f"kind is one of {', '.join(get_args(DenseKind))}; got {kind!r}")
        check_size("width", width)
        check_size("classes", classes)
        self.kind = kind
        self.head = linear(width, classes)

    def forward(self, features: Tensor, layout: TokenLayout, size: tuple[int, int] | None = None) -> Tensor:
        """Compute the map (B, classes, height, width), or (B, classes, time, height, width) for several frames.

        Args:
            features: all tokens (B, N, D), unmerged.
            layout: layout of the tokens.
            size: height and width in pixels; by default one value per patch.
        """
        if features.ndim != 3 or features.shape[1] != layout.num_tokens:
            raise UnsupportedInput(
                f"expected features of shape (batch, {layout.num_tokens} tokens, channels); "
                f"got {tuple(features.shape)}; unmerge merged tokens first"
            )
        maps = self.head(features[:, layout.patches])
        if self.kind == "depth":
            maps = F.softplus(maps)
        time = layout.grid[0]
        maps = maps.transpose(1, 2).unflatten(2, layout.grid)  # (B, C, t, h, w)
        if size is not None:
            frames = maps.transpose(1, 2).flatten(0, 1)
            frames = F.interpolate(frames, size=size, mode="bilinear", align_corners=False)
            maps = frames.unflatten(0, (-1, time)).transpose(1, 2)
        return maps.squeeze(2) if time == 1 else maps
