"""Identical: neighbors with the same pixels merge before the first block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_int, is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import blocked_mask
from vitrail.merging.method import Context, Reduction, register_method
from vitrail.merging.methods.dynamic.base import DynamicMethod, by_first
from vitrail.merging.pixels import pixels_by_patch

LINKS = "vitrail_identical"
"""Name of the guide that holds, for each patch, the patch that it equals, or itself."""


@register_method("identical")
class Identical(DynamicMethod):
    """Merge neighboring patches of equal pixels before the first block: documents, screenshots, screen recordings.

    A patch joins the one to its left if their pixels are equal, else the one above, else the one before in time; so
    areas become one token. It needs no schedule: ``r``, ``keep`` or ``gflops``, if given, limit the merges of the first
    layer, in reading order, and other layers merge nothing. Patches must not overlap.

    Merged patches are equal in their pixels, not in their positions, so results are close to the unmerged model's and
    not the same.

    Args:
        tolerance: largest difference of two pixels that count as equal, in the values that the model receives.
        unit: compare units of unit × unit patches, which merge patch by patch: 2 for models that join 2×2 patches
            later. Patches beyond the last whole unit do not merge.
        bucket: see :class:`DynamicMethod`.
    """

    place = "before"

    def __init__(self, tolerance: float = 0.0, *, unit: int = 1, bucket: int | None = None) -> None:
        super().__init__(bucket)
        if not is_number(tolerance) or tolerance < 0:
            raise InvalidOption(f"tolerance is a difference of pixels, 0 or more; got {tolerance!r}")
        if not is_int(unit, 1):
            raise InvalidOption(f"unit is a number of patches, 1 or more; got {unit!r}")
        self.tolerance, self.unit = float(tolerance), unit

    @property
    def options(self) -> dict[str, Any]:
        values = {"tolerance": self.tolerance, "unit": self.unit}
        defaults = {"tolerance": 0.0, "unit": 1}
        return {name: value for name, value in values.items() if value != defaults[name]} | super().options

    def layers(self, depth: int) -> Sequence[float]:
        return [float(layer == 0) for layer in range(depth)]

    @torch.no_grad()
    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        links = equal_neighbors(pixels_by_patch(inputs, grid), grid, self.tolerance, self.unit)
        return {LINKS: links.to(torch.float64 if inputs.dtype == torch.float64 else torch.float32)}

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        if context.layer:
            return None
        length = context.x.shape[1]
        special = length - math.prod(context.grid)
        position = torch.arange(length, device=context.x.device).expand(context.x.shape[:2])
        link = torch.where(position < special, position, context.guide[LINKS].long() + special)
        blocked = blocked_mask(context.protected, context.present, length, link.device).expand_as(link)
        link = torch.where(blocked | blocked.gather(1, link), position, link)
        joins = link != position
        joins &= joins.long().cumsum(1) <= (r if isinstance(r, int) else r.unsqueeze(1))
        link = torch.where(joins, link, position)
        for _ in range(length.bit_length()):  # each step doubles how far links reach
            link = link.gather(1, link)
        return Reduction(by_first(link, context.present))


def equal_neighbors(pixels: Tensor, grid: tuple[int, int, int], tolerance: float, unit: int) -> Tensor:
    """Return, for each patch of (B, C, P, pixels), the equal one to the left, above or before, or itself: (B, P)."""
    t, h, w = grid
    batch, places = pixels.shape[0], (t, h // unit, w // unit)
    index = torch.arange(t * h * w, device=pixels.device).view(t, h, w)
    whole = index[:, : places[1] * unit, : places[2] * unit]
    units = whole.reshape(t, places[1], unit, places[2], unit).transpose(2, 3).flatten(3)  # (t, rows, columns, u²)
    found = units.expand(batch, *units.shape).clone()
    values = pixels[:, :, units]  # (B, C, t, rows, columns, u², pixels)
    for axis in (0, 1, 2):  # before, above, left: the last one wins
        count = units.shape[axis]
        if count < 2:
            continue
        here, other = (values.narrow(2 + axis, start, count - 1) for start in (1, 0))
        equal = ((here - other).abs() <= tolerance).all(-1).all(-1).all(1)
        earlier = units.narrow(axis, 0, count - 1)
        mine = found.narrow(1 + axis, 1, count - 1)
        mine.copy_(torch.where(equal.unsqueeze(-1), earlier, mine))
    links = index.flatten().expand(batch, -1).clone()
    links[:, units.flatten()] = found.flatten(1)
    return links
