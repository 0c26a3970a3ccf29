"""Grid: CubistMerge (Gong & Lis, 2025), which merges neighbors so that a smaller grid of patches remains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import Protected
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method

Size = tuple[int, int, int]


@register_method("grid")
class Grid(Method):
    """Merge neighbors in every column, then in every row, so that a full grid of fewer rows and columns remains.

    In every column the same number of pairs of vertical neighbors merges, the most similar ones first, and then in
    every row of what is left the same number of horizontal neighbors. Pairs of one direction are disjoint, so a step
    leaves at least half of the rows and half of the columns. Frames of a video keep the same number each.

    A grid shrinks along a fixed chain, from the longer side (rows where both are equal), one row or column at a time:
    14 × 14, 13 × 14, 13 × 13, … The number of patches therefore determines the grid; :meth:`grid_of` returns it. The
    patches of the result are in its row-major order: ``x[:, special:].unflatten(1, Grid.grid_of(patches, grid))``.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        pool: ``"max"`` takes for each channel the value of largest magnitude, ``"mean"`` the mean weighted by size.
    """

    places_groups = True
    keeps_grid = True

    def __init__(self, features: Features = "keys", pool: str = "max") -> None:
        super().__init__()
        self.features = check_features(features)
        if pool not in ("max", "mean"):
            raise InvalidOption(f"pool is 'max' or 'mean'; got {pool!r}")
        self.pooling = pool

    @property
    def options(self) -> dict[str, Any]:
        features = {} if self.features == "keys" else {"features": self.features}
        return features | ({} if self.pooling == "max" else {"pool": self.pooling})

    @property
    def averages(self) -> bool:
        return self.pooling == "mean"

    @staticmethod
    def grid_of(patches: int, grid: Size) -> Size:
        """Return the present grid (t, h, w) of this many patches, of an input with this ``grid``.

        >>> Grid.grid_of(13 * 14, (1, 14, 14))
        (1, 13, 14)
        """
        for size in _chain(grid):
            if size[0] * size[1] * size[2] == patches:
                return size
        raise InvalidOption(
            f"{patches} patches are no whole grid: from {_named(grid)} on, the grid loses one row or column of its "
            "longer side at a time"
        )

    def feasible(self, r: int, tokens: int, special: int, grid: Size) -> int:
        patches = tokens - special
        start, most = self.grid_of(patches, grid), 0
        for size in _chain(start):
            removed = patches - size[0] * size[1] * size[2]
            if removed > r or 2 * size[1] < start[1] or 2 * size[2] < start[2]:
                break
            most = removed
        return most

    def capacity(self, tokens: int, protected: Protected) -> int:
        return max(0, tokens - _in_front(protected) - 1)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        if not isinstance(r, int) or context.present is not None:
            raise InvalidOption("method 'grid' removes the same rows and columns from every image; got a number each")
        special = _in_front(context.protected)
        patches = context.x.shape[1] - special
        before = self.grid_of(patches, context.grid)
        after = self.grid_of(patches - r, context.grid)
        if 2 * after[1] < before[1] or 2 * after[2] < before[2]:
            raise InvalidOption(
                f"one step of method 'grid' leaves at least half of the rows and columns; {r} tokens are too many for "
                f"{_named(before)}"
            )
        with torch.no_grad(), torch.autocast(context.x.device.type, enabled=False):
            features = compute_features(context, self.features)[:, special:]
            features = features.to(torch.promote_types(features.dtype, torch.float32))
            size = None if context.size is None else context.size[:, special:]
            step = _shrink(features, before, before[1] - after[1], axis=1)
            if after[2] < before[2]:
                left = (before[0], after[1], before[2])
                step = step.then(_shrink(step.merge(features, size), left, before[2] - after[2], axis=2))
            front = torch.arange(special, device=features.device).expand(len(features), -1)
            return Reduction(Assignment(torch.cat([front, special + step.target], 1), special + step.length))

    def pool(self, x: Tensor, assignment: Assignment, weight: Tensor | None) -> Tensor:
        if self.averages:
            return super().pool(x, assignment, weight)
        shape = (*assignment.target.shape, x.shape[2])
        index = assignment.target.unsqueeze(2).expand(shape)
        empty = x.new_full((shape[0], assignment.length, shape[2]), float("inf"))
        largest = (-empty).scatter_reduce(1, index, x.expand(shape), "amax")
        smallest = empty.scatter_reduce(1, index, x.expand(shape), "amin")
        return torch.where(largest >= -smallest, largest, smallest)

    def flops(self, tokens: int, head_width: int) -> int:
        return 2 * tokens * head_width


def _chain(grid: Size) -> Iterator[Size]:
    """Yield the sizes of a shrinking grid: one row less, or one column where there are more columns than rows."""
    frames, height, width = grid
    yield grid
    while height * width > 1:
        height, width = (height - 1, width) if height >= width else (height, width - 1)
        yield frames, height, width


def _in_front(protected: Protected) -> int:
    if isinstance(protected, int):
        return protected
    raise InvalidOption(
        "method 'grid' merges in every row and column, so single patches cannot be protected; remove protect=, or use "
        "another method, such as method='tome'"
    )


def _named(grid: Size) -> str:
    return " × ".join(map(str, grid if grid[0] > 1 else grid[1:]))


def _shrink(features: Tensor, grid: Size, count: int, axis: int) -> Assignment:
    """Merge ``count`` pairs of neighbors along an axis (1: rows, 2: columns) of patches (B, t · h · w, D)."""
    unit = F.normalize(features, dim=-1).view(len(features), *grid, -1)
    unit = unit.movedim(axis + 1, 3)  # (B, t, the other axis, length, D)
    similarity = (unit[:, :, :, 1:] * unit[:, :, :, :-1]).sum(-1)
    joined = choose_pairs(torch.where(similarity.isnan(), -2, similarity), count)
    place = torch.arange(grid[axis], device=features.device) - F.pad(joined.long().cumsum(-1), (1, 0))
    place = place.movedim(3, axis + 1)
    frames, height, width = grid
    kept = (frames, height - count, width) if axis == 1 else (frames, height, width - count)
    frame, row, column = torch.meshgrid(*(torch.arange(n, device=features.device) for n in grid), indexing="ij")
    row, column = (place, column) if axis == 1 else (row, place)
    target = (frame * kept[1] + row) * kept[2] + column
    return Assignment(target.flatten(1), kept[0] * kept[1] * kept[2])


def choose_pairs(similarity: Tensor, count: int) -> Tensor:
    """Choose ``count`` disjoint pairs of neighbors on each line, the most similar ones first.

    Args:
        similarity: similarity (…, L − 1) of each of L tokens on a line with the next one.
        count: number of pairs, at most L / 2. A pair is passed over if too few others would be left beside it.

    Returns:
        True for the pairs that are chosen (…, L − 1).
    """
    pairs = similarity.shape[-1]
    index = torch.arange(pairs, device=similarity.device)
    open_, chosen = torch.ones_like(similarity, dtype=torch.bool), torch.zeros_like(similarity, dtype=torch.bool)
    # A pair in the middle of an odd run of open ones on both sides costs two of the pairs that still fit, others one.
    spare = (pairs + 1) // 2 - count
    tight, spared = spare < count - 1, torch.full_like(similarity[..., :1], spare, dtype=torch.long)
    for _ in range(count):
        allowed = open_
        if tight:
            costly = _run_is_odd(open_) & _run_is_odd(open_.flip(-1)).flip(-1)
            allowed = open_ & ~(costly & (spared == 0))
        best = similarity.masked_fill(~allowed, float("-inf")).argmax(-1, keepdim=True)
        if tight:
            spared = spared - costly.gather(-1, best).long()
        chosen = chosen | (index == best)
        open_ = open_ & ((index - best).abs() > 1)
    return chosen


def _run_is_odd(open_: Tensor) -> Tensor:
    """Return whether the number of consecutive open pairs directly before each pair is odd."""
    index = torch.arange(open_.shape[-1], device=open_.device)
    closed_before = ~open_.unsqueeze(-2) & (index < index.unsqueeze(1))
    last = torch.where(closed_before, index, -1).amax(-1)
    return (index - last - 1) % 2 == 1
