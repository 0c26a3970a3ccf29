"""Pixels by patch, for methods that compute maps from the model's input (``Method.maps``)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import UnsupportedInput

MOST_CHANNELS = 4
"""Most channels of an axis that is taken for channels."""


def channels_first(inputs: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return images (B, C, H, W), or videos with frames or channels first, as float32 or better (B, C, T, H, W)."""
    inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if inputs.dim() == 4:
        inputs = inputs.unsqueeze(2)
    elif inputs.dim() == 5 and inputs.shape[1] > MOST_CHANNELS >= inputs.shape[2]:
        inputs = inputs.transpose(1, 2)
    if inputs.dim() != 5 or any(n % cells for n, cells in zip(inputs.shape[2:], grid, strict=True)):
        raise UnsupportedInput(
            f"an input of shape {tuple(inputs.shape)} does not divide into a patch grid of {grid}: methods that read "
            "pixels need images or videos with patches that do not overlap; choose a method that reads tokens instead"
        )
    return inputs


def pixels_by_patch(inputs: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return the values of each patch, in the order of the patches: (B, C, P, pixels)."""
    frames = channels_first(inputs, grid)
    (batch, channels), (t, h, w) = frames.shape[:2], grid
    p, q, s = (n // cells for n, cells in zip(frames.shape[2:], grid, strict=True))
    cells = frames.reshape(batch, channels, t, p, h, q, w, s).permute(0, 1, 2, 4, 6, 3, 5, 7)
    return cells.reshape(batch, channels, t * h * w, p * q * s)
