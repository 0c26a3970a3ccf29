"""Changes of colour and sharpness: a batch at once, each picture by amounts of its own.

Pictures are (b, 3, H, W) in float, from 0 to 1; amounts are (b,).
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)
"""How much red, green and blue count in the grey of a picture, as in torchvision."""


def grey(images: Tensor) -> Tensor:
    """Give the grey of pictures, (b, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def jitter(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Change brightness, contrast and saturation, by factors, and clip after each.

    But for the clipping the three commute, so that a fixed order loses little against a random one.
    """
    images = (images * _each(brightness)).clamp(0, 1)
    middle = grey(images).mean((2, 3), keepdim=True)
    images = torch.lerp(middle, images, _each(contrast)).clamp(0, 1)
    return torch.lerp(grey(images), images, _each(saturation)).clamp(0, 1)


def solarise(images: Tensor, threshold: float = 128 / 255) -> Tensor:
    """Invert what is bright."""
    return torch.where(images >= threshold, 1 - images, images)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur by a Gaussian of so many pixels, mirrored at the border; where it is 0, leave pictures as they are.

    Along each axis this is a product with a matrix, whatever the width.
    """
    side = images.shape[-1]
    if images.shape[-2] != side:
        raise ValueError("expected square pictures")
    matrix = blurring(sigma, side)[:, None]
    return matrix @ images @ matrix.mT


def blurring(sigma: Tensor, side: int) -> Tensor:
    """Make the matrices (b, side, side) that blur an axis."""
    place = torch.arange(side, device=sigma.device, dtype=sigma.dtype)
    here, there = place[:, None], place[None, :]
    sharp = (-0.5 / sigma.clamp(min=1e-3) ** 2)[:, None, None]
    low, high = there > 0, there < side - 1  # the border's own pixels are not mirrored
    weights = torch.exp(sharp * (there - here) ** 2)
    weights = weights + low * torch.exp(sharp * (there + here) ** 2)
    weights = weights + high * torch.exp(sharp * (2 * (side - 1) - there - here) ** 2)
    return weights / weights.sum(-1, keepdim=True)


def erase(images: Tensor, start: Tensor, size: Tensor, colour: Tensor) -> Tensor:
    """Fill boxes (top, left) and (height, width), each (b, 2) in pixels, with a colour (b, 3)."""
    inside = box(start, start + size, images.shape[-2], images.shape[-1])
    return torch.where(inside[:, None], colour[..., None, None], images)


def box(start: Tensor, end: Tensor, height: int, width: int) -> Tensor:
    """Say which pixels are in boxes (top, left) to (bottom, right), each (b, 2): (b, height, width)."""
    rows = torch.arange(height, device=start.device)
    columns = torch.arange(width, device=start.device)
    down = (rows >= start[:, :1]) & (rows < end[:, :1])
    across = (columns >= start[:, 1:]) & (columns < end[:, 1:])
    return down[:, :, None] & across[:, None, :]


def _each(amounts: Tensor) -> Tensor:
    return amounts[:, None, None, None]
