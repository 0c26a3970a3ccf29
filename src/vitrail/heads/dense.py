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
        maps = self.head(_patches(features, layout))
        if self.kind == "depth":
            maps = F.softplus(maps)
        time = layout.grid[0]
        maps = maps.transpose(1, 2).unflatten(2, layout.grid)  # (B, C, t, h, w)
        if size is not None:
            frames = maps.transpose(1, 2).flatten(0, 1)
            frames = F.interpolate(frames, size=size, mode="bilinear", align_corners=False)
            maps = frames.unflatten(0, (-1, time)).transpose(1, 2)
        return maps.squeeze(2) if time == 1 else maps


class DecoderHead(nn.Module):
    """A small convolutional decoder on the patch grid, for segmentation.

    A projection of each patch, then stages of bilinear upsampling by 2, a 3 × 3 convolution, group norm and GELU, and a
    1 × 1 convolution to classes; the last map is interpolated to pixels.

    Args:
        width: channels of a token.
        classes: channels of the map.
        hidden: channels of the decoder, a multiple of 8.
        stages: how often the map doubles.
    """

    def __init__(self, width: int, classes: int, *, hidden: int = 64, stages: int = 2) -> None:
        super().__init__()
        for name, size in {"width": width, "classes": classes, "hidden": hidden, "stages": stages}.items():
            check_size(name, size)
        if hidden % GROUPS:
            raise InvalidOption(f"hidden is a multiple of {GROUPS}; got {hidden}")
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, hidden)
        self.stages = nn.Sequential(*(_stage(hidden) for _ in range(stages)))
        self.classify = nn.Conv2d(hidden, classes, 1)

    def forward(self, features: Tensor, layout: TokenLayout, size: tuple[int, int] | None = None) -> Tensor:
        """Compute logits (B, classes, height, width) from all tokens (B, N, D) of one frame, unmerged.

        Args:
            features: all tokens, in the order of the layout.
            layout: layout of the tokens.
            size: height and width in pixels; by default what the stages reach.
        """
        patches = _patches(features, layout)
        if layout.grid[0] != 1:
            raise UnsupportedInput(f"a decoder head takes single images; this grid has {layout.grid[0]} frames")
        maps = self.project(self.norm(patches)).transpose(1, 2).unflatten(2, layout.grid[1:])
        maps = self.classify(self.stages(maps))
        return maps if size is None else F.interpolate(maps, size=size, mode="bilinear", align_corners=False)


GROUPS = 8
"""Groups of the decoder's group norm."""


def _stage(hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        nn.Conv2d(hidden, hidden, 3, padding=1),
        nn.GroupNorm(GROUPS, hidden),
        nn.GELU(),
    )


def _patches(features: Tensor, layout: TokenLayout) -> Tensor:
    """Return the patches (B, P, D) of all tokens; raise if some are missing."""
    if features.ndim != 3 or features.shape[1] != layout.num_tokens:
        raise UnsupportedInput(
            f"expected features of shape (batch, {layout.num_tokens} tokens, channels); "
            f"got {tuple(features.shape)}; unmerge merged tokens first"
        )
    return features[:, layout.patches]
