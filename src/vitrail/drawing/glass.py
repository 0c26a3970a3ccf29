"""Stained glass: each group of patches one pane in its mean color, held by leads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail._arguments import checked
from vitrail.data.decode import as_rgb
from vitrail.errors import InvalidOption, UnsupportedInput

LEAD_COLOR = (22, 20, 24)
"""Almost black, slightly cold, as leads look against the light."""

_STRIP = 256  # rows painted at a time, to bound memory for large images


@checked
def stained_glass(image: Image.Image, groups: Any, *, lead: float | None = None) -> Image.Image:
    """Paint an image as stained glass at its own resolution.

    Each group is painted in the mean color of its pixels, wherever its cells lie, and a dark lead runs between
    neighboring cells of different groups (never along the border).

    The mean is the plain mean of sRGB values, which are spaced as the eye sees. A mean of physical light would let each
    highlight wash out its pane.

    Args:
        image: any PIL image.
        groups: (h, w) integers over the patch grid, stretched over the whole image; equal numbers belong together.
        lead: width of the leads in pixels, at most that of a cell; by default it grows with the image.

    Example:
        >>> import numpy as np
        >>> stained_glass(Image.new("RGB", (300, 200), "red"), np.arange(6).reshape(2, 3)).size
        (300, 200)
    """
    if lead is not None and not (np.isreal(lead) and np.isfinite(lead) and lead >= 0):
        raise InvalidOption(f"lead={lead!r}: expected a width in pixels, 0 or more")
    return paint([as_rgb(image)], _check_groups(groups)[None], lead)[0]


def paint(images: Sequence[Image.Image], groups: Any, lead: float | None = None) -> list[Image.Image]:
    """Paint RGB images of one size as stained glass, with groups (n, h, w): a group has one color in all of them."""
    cells = np.unique(groups, return_inverse=True)[1].reshape(np.shape(groups))
    pixels = [np.asarray(image) for image in images]
    height, width = pixels[0].shape[:2]
    if height * width == 0:
        raise UnsupportedInput(f"the image has no pixels ({width} × {height})")
    row, column = _Axis(height, cells.shape[1]), _Axis(width, cells.shape[2])
    lead = _lead_width(row, column) if lead is None else min(float(lead), row.step, column.step)
    palette = _mean_colors(pixels, cells, row, column)
    made = []
    for one in cells:
        cell_colors = palette[one][:, column.cell]  # (h, W, 3): rows of cells, as wide as the image
        painted = cell_colors[row.cell]
        if lead > 0:
            _draw_leads(painted, one, row, column, lead)
        made.append(Image.fromarray(painted))
    return made


class _Axis:
    """One side of the image, of ``pixels`` pixels under ``cells`` cells of the grid.

    Attributes:
        cell: cell that holds each pixel's center.
        vertex: nearest line of the grid, 0 to ``cells``.
        distance: distance of each pixel's center from it, in pixels.
        step: size of a cell in pixels, not always a whole number.
    """

    def __init__(self, pixels: int, cells: int) -> None:
        index = np.arange(pixels)
        self.step = pixels / cells
        self.cell = (2 * index + 1) * cells // (2 * pixels)
        center = index + 0.5
        self.vertex = np.rint(center / self.step).astype(np.intp)
        self.distance = np.abs(center - self.vertex * self.step).astype(np.float32)

    def starts(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the cells that hold a pixel at all, and the first pixel of each."""
        return np.unique(self.cell, return_index=True)


def _mean_colors(
    images: Sequence[NDArray[np.uint8]], cells: NDArray[np.intp], row: _Axis, column: _Axis
) -> NDArray[np.uint8]:
    """Return each group's mean color (G, 3): pixels summed exactly over cells, then cells over groups and images."""
    rows, row_starts = row.starts()
    columns, column_starts = column.starts()
    heights = np.diff(row_starts, append=row.cell.size)
    widths = np.diff(column_starts, append=column.cell.size)
    total = int(cells.max()) + 1
    area, sums = np.zeros(total), np.zeros((total, 3))
    for pixels, groups in zip(images, cells, strict=True):
        seen = groups[np.ix_(rows, columns)].ravel()
        strips = np.add.reduceat(pixels, row_starts, axis=0, dtype=np.uint32)
        parts = np.add.reduceat(strips, column_starts, axis=1, dtype=np.uint64).reshape(-1, 3)
        area += np.bincount(seen, weights=np.outer(heights, widths).ravel(), minlength=total)
        sums += np.stack([np.bincount(seen, weights=channel, minlength=total) for channel in parts.T], axis=-1)
    return np.rint(sums / np.maximum(area, 1)[:, None]).astype(np.uint8)


def _draw_leads(painted: NDArray[np.uint8], cells: NDArray[np.intp], row: _Axis, column: _Axis, lead: float) -> None:
    """Draw leads along the grid lines between cells of different groups, smooth at any resolution, in place.

    A pixel sees the four grid lines that meet in its nearest vertex. In its quarter of that vertex it is near the lead
    that runs across, the one that runs down, both (a corner of the pane, rounded like solder), or none (the outside of
    a bend, closed by a round cap).
    """
    height, width = cells.shape
    leads_across = np.zeros((height + 1, width), dtype=bool)  # a lead above cell (y, x), for y in 0 … height
    leads_down = np.zeros((height, width + 1), dtype=bool)  # a lead left of cell (y, x), for x in 0 … width
    leads_across[1:-1] = cells[1:] != cells[:-1]
    leads_down[:, 1:-1] = cells[:, 1:] != cells[:, :-1]
    bends = np.zeros((height + 1, width + 1), dtype=bool)
    bends[:, 1:] |= leads_across
    bends[:, :-1] |= leads_across
    bends[1:] |= leads_down
    bends[:-1] |= leads_down
    half, radius = lead / 2, min(1.6 * lead, 0.25 * min(row.step, column.step))
    color = np.array(LEAD_COLOR, dtype=np.float32)
    for top in range(0, len(painted), _STRIP):
        strip = slice(top, top + _STRIP)
        y = row.distance[strip, None] - half  # distance from the edge of the lead that runs across here
        x = column.distance[None, :] - half
        across = leads_across[row.vertex[strip]][:, column.cell]
        down = leads_down[row.cell[strip]][:, column.vertex]
        bend = bends[row.vertex[strip]][:, column.vertex]
        gap = np.minimum(np.where(across, y, np.inf), np.where(down, x, np.inf))
        corner = across & down & (y < radius) & (x < radius)
        rounded = radius - np.hypot(radius - y, radius - x)
        gap = np.where(corner, np.minimum(gap, rounded), gap)
        cap = np.hypot(y + half, x + half) - half
        gap = np.where(bend, np.minimum(gap, cap), gap)
        cover = np.clip(0.5 - gap, 0, 1).astype(np.float32)[..., None]
        part = painted[strip]
        part[...] = np.rint(part + (color - part) * cover).astype(np.uint8)


def _lead_width(row: _Axis, column: _Axis) -> float:
    """Return a width that looks alike at any resolution: a share of a cell, and at most one of the image."""
    cell, image = min(row.step, column.step), min(row.cell.size, column.cell.size)
    return max(min(0.1 * cell, 0.005 * image), min(1.0, 0.2 * cell))


def _check_groups(groups: Any) -> NDArray[np.intp]:
    """Return the groups as numbers from 0 without gaps."""
    array = np.asarray(groups)
    if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise UnsupportedInput(
            f"groups has shape {array.shape} and dtype {array.dtype}; expected integers (h, w), one for each cell of "
            "the patch grid. Reshape a row of trace.groups to the grid of its layout"
        )
    return np.unique(array, return_inverse=True)[1].reshape(array.shape)
