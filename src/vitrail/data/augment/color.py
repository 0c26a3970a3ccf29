"""Color and sharpness of a batch, each image by amounts of its own.

Images are (b, 3, H, W) in float, from 0 to 1; amounts are (b,).
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in gray, as in torchvision."""


def gray(images: Tensor) -> Tensor:
    """Return images in gray, (b, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def jitter(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation by factors, clipping after each.

    Apart from clipping the three commute, so that a fixed order loses little against a random one.
    """
    brightness, contrast, saturation = (one[:, None, None, None] for one in (brightness, contrast, saturation))
    images = (images * brightness).clamp(0, 1)
    mean = gray(images).mean((2, 3), keepdim=True)
    images = torch.lerp(mean, images, contrast).clamp(0, 1)
    return torch.lerp(gray(images), images, saturation).clamp(0, 1)


def solarize(images: Tensor, threshold: float = 128 / 255) -> Tensor:
    """Invert pixels above a threshold."""
    return torch.where(images >= threshold, 1 - images, images)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur by a Gaussian of ``sigma`` pixels, mirrored at the border; a sigma of 0 changes nothing.

    Along each axis this is a matrix product, whatever the width.
    """
    side = images.shape[-1]
    if images.shape[-2] != side:
        raise ValueError("expected square images")
    matrix = blur_matrix(sigma, side)[:, None]
    return matrix @ images @ matrix.mT


def blur_matrix(sigma: Tensor, side: int) -> Tensor:
    """Return the matrices (b, side, side) that blur an axis."""
    place = torch.arange(side, device=sigma.device, dtype=sigma.dtype)
    here, there = place[:, None], place[None, :]
    sharp = (-0.5 / sigma.clamp(min=1e-3) ** 2)[:, None, None]
    low, high = there > 0, there < side - 1  # border pixels are not mirrored
    weights = torch.exp(sharp * (there - here) ** 2)
    weights = weights + low * torch.exp(sharp * (there + here) ** 2)
    weights = weights + high * torch.exp(sharp * (2 * (side - 1) - there - here) ** 2)
    return weights / weights.sum(-1, keepdim=True)


def erase(images: Tensor, start: Tensor, size: Tensor, color: Tensor) -> Tensor:
    """Fill boxes (top, left) and (height, width), each (b, 2) in pixels, with a color (b, 3)."""
    inside = box_mask(start, start + size, images.shape[-2], images.shape[-1])
    return torch.where(inside[:, None], color[..., None, None], images)


def box_mask(start: Tensor, end: Tensor, height: int, width: int) -> Tensor:
    """Return a mask (b, height, width) of the pixels in boxes (top, left) to (bottom, right), each (b, 2)."""
    rows = torch.arange(height, device=start.device)
    columns = torch.arange(width, device=start.device)
    down = (rows >= start[:, :1]) & (rows < end[:, :1])
    across = (columns >= start[:, 1:]) & (columns < end[:, 1:])
    return down[:, :, None] & across[:, None, :]
