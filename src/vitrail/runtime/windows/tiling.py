"""Tiling: what the windows of a model's blocks mean for schedules and costs, as numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from vitrail.adapters import Found
from vitrail.adapters.windows import LayerWindows, Tile, WindowedAdapter
from vitrail.errors import UnsupportedModel
from vitrail.merging import Method, Room
from vitrail.merging.schedule import Capacity, RunsRoom

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Tiling:
    """The windows of each block. Consecutive blocks with the same windows are a run: tokens stay merged inside it.

    Attributes:
        layers: the grid of each block and its windows.
    """

    layers: tuple[LayerWindows, ...]

    @classmethod
    def of(cls, found: Found) -> Tiling | None:
        """Return the tiling of a model; None where attention sees all tokens, or windows are segments."""
        layers = found.adapter.layer_windows(found.trunk)
        if not layers or found.adapter.packed:
            return None
        if len(layers) != len(found.blocks) or not all(isinstance(p, WindowedAdapter) for p in found.block_adapters):
            raise UnsupportedModel(
                f"the adapter of {type(found.trunk).__name__} does not know the windows of all blocks"
            )
        return cls(layers)

    def run(self, grid: Grid, layer: int) -> tuple[int, int]:
        """Return the first block of the run that a block is in, and the one behind its last, for a patch grid."""
        return next(run for run in self.runs(grid) if run[0] <= layer < run[1])

    def runs(self, grid: Grid) -> list[tuple[int, int]]:
        """Return the first block of each run, and the one behind its last, for a patch grid."""
        kinds = [one.kind(grid) for one in self.layers]
        starts = [layer for layer, kind in enumerate(kinds) if not layer or kind is None or kind != kinds[layer - 1]]
        return list(zip(starts, [*starts[1:], len(self.layers)], strict=True))

    def tiles(self, grid: Grid, layer: int) -> tuple[Tile, ...]:
        """Return the tiles of a block for a patch grid; none for a block that does not merge."""
        one = self.layers[layer]
        return () if one.windows is None else one.windows.tiles(one.grid(grid))

    def room(self, method: Method, grid: Grid) -> RunsRoom:
        """Return how many tokens can merge in the largest tile of each block."""
        pieces = []
        for start, stop in self.runs(grid):
            tiles = self.tiles(grid, start)
            pieces.append((stop - start, _room(method, tiles[0]) if tiles else None))
        most = max((room.tokens for _, room in pieces if room is not None), default=1)
        return RunsRoom(most, 0, capacity=method.capacity, pieces=tuple(pieces))

    def merges(
        self, method: Method, grid: Grid, per_layer: Sequence[int], layer: int
    ) -> list[tuple[Tile, tuple[int, ...]]]:
        """Return the tiles of a block with the number of tokens that each merges, in every layer.

        ``per_layer`` is for the largest tile; the others merge the same share, rounded down. Layers outside of the
        block's run merge nothing.
        """
        start, stop = self.run(grid, layer)
        found = []
        tiles = self.tiles(grid, layer)
        for tile in tiles:
            wanted = [r * tile.tokens // tiles[0].tokens for r in per_layer[start:stop]]
            own = _room(method, tile).cap(wanted)
            found.append((tile, (*(0,) * start, *own, *(0,) * (len(per_layer) - stop))))
        return found

    def fed(self, method: Method, grid: Grid, per_layer: Sequence[int]) -> list[dict[Tile, int]]:
        """Return, for each block, how many tokens of each tile its MLP works on; none where no token has merged."""
        found = []
        for layer in range(len(self.layers)):
            start, _ = self.run(grid, layer)
            tiles = self.merges(method, grid, per_layer, layer) if any(per_layer[start : layer + 1]) else ()
            first = layer if method.scope == "block" else 0
            found.append({tile: tile.tokens - sum(own[first : layer + 1]) for tile, own in tiles})
        return found

    def lengths(self, method: Method, grid: Grid, per_layer: Sequence[int]) -> list[int]:
        """Return the number of tokens that the MLP of each block works on, in all tiles."""
        return [
            sum(tile.count * length for tile, length in tiles.items()) or prod(layer.grid(grid))
            for layer, tiles in zip(self.layers, self.fed(method, grid, per_layer), strict=True)
        ]


def _room(method: Method, tile: Tile) -> Room:
    """Return how many tokens of one tile can merge."""
    feasible: Capacity | None = None
    if not method.any_count:
        feasible = partial(method.feasible, special=0, grid=(1, *tile.shape))
    return Room(tile.tokens, 0, None, method.capacity, method.scope == "block", feasible)
