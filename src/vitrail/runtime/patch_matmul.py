"""Patch embedding as one matrix product.

Patches do not overlap, so their convolution is a product of (patches × pixels) and (pixels × channels). Convolution
kernels do not exploit that and take many times as long, which matters once the blocks are fast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels


class PatchProduct:
    """Mixin in front of a convolution whose stride equals its kernel; a matrix product in half precision on a GPU."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float16) or not kernels.usable(x) or x.dtype != self.weight.dtype:
            return super().forward(x)  # type: ignore[misc]
        high, wide = self.kernel_size
        batch, channels, height, width = x.shape
        rows, columns = height // high, width // wide
        cells = x[..., : rows * high, : columns * wide].reshape(batch, channels, rows, high, columns, wide)
        flat = cells.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, channels * high * wide)
        tokens = F.linear(flat, self.weight.flatten(1), self.bias)
        return tokens.view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def patch_convolutions(parts: list[nn.Module]) -> list[nn.Module]:
    """Return the convolutions among these modules that embed non-overlapping patches."""
    return [part for part in parts if type(part) is nn.Conv2d and _cuts_patches(part)]


def _cuts_patches(conv: nn.Conv2d) -> bool:
    return (
        tuple(conv.stride) == tuple(conv.kernel_size)
        and not any(conv.padding if isinstance(conv.padding, tuple) else (1,))
        and set(conv.dilation) == {1}
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )
