"""Random resized crops and affine warps of a batch, each image with its own box and angle.

Images are (b, C, S, S) in float. Boxes are in whole pixels, so that cropping first and resizing afterwards gives the
same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHARPNESS = -0.5
"""Parameter of the cubic kernel, as in Pillow and in the antialiased resizing of torch."""


def random_boxes(
    areas: Tensor,
    ratios: Tensor,
    places: Tensor,
    side: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    otherwise: float,
) -> tuple[Tensor, Tensor]:
    """Map numbers from 0 to 1 to boxes (top, left) and (height, width), each (b, 2): a random resized crop.

    ``areas`` (b, tries) are shares of the image within ``scale``, ``ratios`` (b, tries) widths over heights within
    ``ratio``, uniform in the logarithm, ``places`` (b, 2) where the box is. The first try that fits into the image, of
    height and width ``side``, is taken; if none does, a square of the side ``otherwise``.
    """
    area = (scale[0] + (scale[1] - scale[0]) * areas) * side**2
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * ratios)
    sizes = torch.stack([(area / aspect).sqrt(), (area * aspect).sqrt()], -1).round()
    fits = ((sizes > 0) & (sizes <= side)).all(-1)
    first = fits.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, 2)
    size = torch.where(fits.any(1)[:, None], sizes.gather(1, first)[:, 0], otherwise)
    start = torch.minimum((places * (side - size + 1)).floor(), side - size)
    return start, size


def crop(images: Tensor, start: Tensor, size: Tensor, flip: Tensor, out: int, *, nearest: bool = False) -> Tensor:
    """Crop boxes and resize them to (b, C, out, out), bicubic and antialiased; ``flip`` (b,) mirrors horizontally.

    Resizing is linear, so each axis is one matrix product: exact for any box, without gathering pixels. With
    ``nearest`` each pixel takes the value of one pixel, as masks must.
    """
    side, matrix = images.shape[-1], nearest_matrix if nearest else resize_matrix
    rows = matrix(start[:, 0], size[:, 0], side, out)
    columns = matrix(start[:, 1], size[:, 1], side, out)
    columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ (images @ columns[:, None].mT)


def resize_matrix(start: Tensor, size: Tensor, side: int, out: int) -> Tensor:
    """Return the matrices (b, out, side) that crop a part of an axis and resize it."""
    step = size / out
    places = start[:, None] + step[:, None] * (torch.arange(out, device=start.device) + 0.5)
    pixels = torch.arange(side, device=start.device) + 0.5
    weights = cubic((pixels - places[..., None]) / step.clamp(min=1)[:, None, None])
    end = (start + size)[:, None, None]
    weights = weights * ((pixels > start[:, None, None]) & (pixels < end))
    return weights / weights.sum(-1, keepdim=True)


def nearest_matrix(start: Tensor, size: Tensor, side: int, out: int) -> Tensor:
    """Return the matrices (b, out, side) that crop a part of an axis and take the pixel nearest to each new one."""
    centers = torch.arange(out, device=start.device) + 0.5
    places = (start[:, None] + (size / out)[:, None] * centers).floor().long().clamp(0, side - 1)
    return F.one_hot(places, side).to(start.dtype)


def cubic(distance: Tensor) -> Tensor:
    """Return the weights of pixels by distance (Keys, 1981)."""
    x, a = distance.abs(), SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def affine(angle: Tensor, shear: Tensor, shift: Tensor) -> Tensor:
    """Return maps (b, 2, 3) from output to input coordinates, both from -1 to 1.

    Angles (b,) are clockwise, in radians; shears and shifts (b, 2) along x and y, per distance along the other axis
    and as shares of the side.
    """
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], 1)
    one = torch.ones_like(angle)
    slant = torch.stack([torch.stack([one, shear[:, 0]], -1), torch.stack([shear[:, 1], one], -1)], 1)
    linear = turn @ slant
    return torch.cat([linear, linear @ (-2 * shift[..., None])], 2)


def warp(
    images: Tensor, start: Tensor, size: Tensor, flip: Tensor, maps: Tensor, out: int, *, nearest: bool = False
) -> Tensor:
    """Crop, warp and resize boxes to (b, C, out, out) in one bicubic sampling; with ``nearest`` values are not mixed.

    Pixels outside of the box come from the image, and outside of the image from its mirror image. Boxes that shrink to
    a half or less are sampled from an image of that size. Boxes and ``flip`` are as for :func:`crop`; ``maps``, of
    :func:`affine`, are relative to the box.
    """
    side = images.shape[-1]
    half = (size / side).flip(1)
    middle = ((start + size / 2) / (side / 2) - 1).flip(1)
    mirror = torch.stack([1 - 2 * flip.to(half.dtype), torch.ones_like(half[:, 0])], 1)
    placed = torch.cat([maps[:, :, :2] * mirror[:, None], maps[:, :, 2:]], 2) * half[..., None]
    placed = torch.cat([placed[:, :, :2], placed[:, :, 2:] + middle[..., None]], 2)
    grid = F.affine_grid(placed, [len(images), images.shape[1], out, out], align_corners=False)
    if nearest:
        return F.grid_sample(images, grid, "nearest", "reflection", align_corners=False)
    levels = max(int(math.log2(side / out)), 0)
    wanted = (size.amax(1) / out).log2().floor().clamp(0, levels)[:, None, None, None]
    made = images
    for level in range(levels + 1):
        small = F.avg_pool2d(images, 2**level, ceil_mode=True) if level else images
        sampled = F.grid_sample(small, grid, "bicubic", "reflection", align_corners=False)
        made = torch.where(wanted == level, sampled, made) if level else sampled
    return made
