"""Blocks whose attention runs inside windows of a grid: how tokens fall into windows, and the adapter of such a block.

A window may have regions that do not see each other (shifted windows wrap around the edges), and cells without a token
(the grid is padded to whole windows). A `Tile` is the part of a window that attends to itself: all tokens of one
region, with the padding that they see. Tiles of the same shape make a batch, of which methods see each tile as an image
of its own. All of this is numbers; tensors are made where tokens are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import NamedBlock, find_part
from vitrail.adapters.position import Position, RelativeBias
from vitrail.tokens import TokenLayout

Size = tuple[int, int]


@dataclass(frozen=True)
class Strip:
    """Parts of windows along one axis that look alike: the same cells of a window, and the same of them with a token.

    Attributes:
        cells: cells of the window that hold a token, then those that are padding.
        tokens: number of cells that hold a token.
        places: for each such part, the places of its tokens on the axis.
    """

    cells: tuple[int, ...]
    tokens: int
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tile:
    """Parts of windows that attend to themselves alone and look alike.

    Attributes:
        rows, columns: the parts along both axes; every pair of them is a tile.
        grid: the grid of all tokens (h, w).
        window: rows and columns of a window.
    """

    rows: Strip
    columns: Strip
    grid: Size
    window: Size

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.rows.places) * len(self.columns.places)

    @property
    def shape(self) -> Size:
        """Rows and columns of tokens in a tile."""
        return self.rows.tokens, self.columns.tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in a tile."""
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of cells without a token that the tokens of a tile attend to."""
        return len(self.rows.cells) * len(self.columns.cells) - self.tokens

    def places(self, device: torch.device) -> Tensor:
        """Return where the tokens of each tile are in the grid, row by row (count, tokens)."""
        rows = torch.tensor(self.rows.places, device=device)[:, None, :, None]
        columns = torch.tensor(self.columns.places, device=device)[None, :, None, :]
        return (rows * self.grid[1] + columns).reshape(self.count, self.tokens)

    def cells(self) -> list[Size]:
        """Return the row and column inside the window of each token, then of each cell of padding."""
        every = [(row, column) for row in range(len(self.rows.cells)) for column in range(len(self.columns.cells))]
        held = [row < self.rows.tokens and column < self.columns.tokens for row, column in every]
        order = [*(one for one, full in zip(every, held, strict=True) if full)]
        order += [one for one, full in zip(every, held, strict=True) if not full]
        return [(self.rows.cells[row], self.columns.cells[column]) for row, column in order]


@dataclass(frozen=True)
class Windows:
    """How the attention of one block divides its grid.

    Attributes:
        size: rows and columns of a window; None where the whole grid is one window.
        shift: rows and columns by which the grid is rolled before it is divided; regions as in Swin.
        pads_first: whether the grid is padded to whole windows before it is rolled; else after it.
        small: for grids that one window covers: ``"kept"``; ``"unshifted"``, without a shift along each axis that one
            window covers; ``"shrunk"``, with square windows as long as the shorter side, and no shift.
    """

    size: Size | None = None
    shift: Size = (0, 0)
    pads_first: bool = False
    small: Literal["kept", "unshifted", "shrunk"] = "kept"

    def on(self, grid: Size) -> tuple[Size, Size]:
        """Return the size and the shift of the windows of a grid."""
        if self.size is None:
            return grid, (0, 0)
        (rows, columns), (down, right) = self.size, self.shift
        if self.small == "shrunk" and min(grid) <= min(self.size):
            return (min(grid), min(grid)), (0, 0)
        if self.small == "unshifted":
            down, right = (0 if rows >= grid[0] else down), (0 if columns >= grid[1] else right)
        return (rows, columns), (down, right)

    def padded(self, grid: Size) -> tuple[int, Size]:
        """Return the number of windows of a grid, padding included, and the rows and columns of each."""
        size, _ = self.on(grid)
        return prod(-(-side // step) for side, step in zip(grid, size, strict=True)), size

    def tiles(self, grid: Size) -> tuple[Tile, ...]:
        """Return the tiles of a grid, the one with the most tokens first."""
        size, shift = self.on(grid)
        rows, columns = (_strips(*axis, self.pads_first) for axis in zip(grid, size, shift, strict=True))
        found = [Tile(row, column, grid, size) for row in rows for column in columns]
        return tuple(sorted(found, key=lambda tile: (-tile.tokens, -tile.count)))


def _strips(side: int, step: int, shift: int, pads_first: bool) -> list[Strip]:
    """Return the parts of windows along one axis of ``side`` tokens, those that look alike together."""
    padded = -(-side // step) * step
    places: list[int | None] = [*range(side)]
    if pads_first:
        places += [None] * (padded - side)
    places = places[shift:] + places[:shift]
    places += [None] * (padded - len(places))
    edges = {padded - step, padded - shift} if shift else set()
    found: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for start in range(0, padded, step):
        inside = sorted({start, start + step, *(edge for edge in edges if start < edge < start + step)})
        for begin, end in pairwise(inside):
            held = [cell for cell in range(begin, end) if places[cell] is not None]
            if held:
                empty = [cell for cell in range(begin, end) if places[cell] is None]
                cells = tuple(cell - start for cell in (*held, *empty))
                found.setdefault((cells, len(held)), []).append(tuple(places[cell] for cell in held))  # type: ignore[misc]
    return [Strip(cells, tokens, tuple(own)) for (cells, tokens), own in found.items()]


@dataclass(frozen=True)
class Pooling:
    """Cost of a block that runs as it is: it pools its queries or keys, or mixes tokens outside of attention.

    Attributes:
        windows: how its attention divides the grid that enters.
        stride: tokens along each axis that become one.
        qkv, shortcut: weights that multiply every token that enters, padding included and without.
        proj: weights that multiply every attended token.
        pair: multiply-adds for a query and a key.
        feed: weights that multiply every token that leaves.
        keys: tokens along each axis that become one key.
        key: weights that multiply every key.
        rows: weights that multiply every query for each row and each column of keys.
    """

    windows: Windows
    stride: int
    qkv: int
    shortcut: int
    proj: int
    pair: int
    feed: int
    keys: int = 1
    key: int = 0
    rows: int = 0

    def cost(self, grid: Size) -> dict[str, int]:
        """Return the multiply-adds by part, for the grid that leaves."""
        entered = grid[0] * self.stride, grid[1] * self.stride
        windows, size = self.windows.padded(entered)
        cells = windows * prod(size)
        queries, keys = cells // self.stride**2, [-(-side // self.keys) for side in size]
        projections = cells * self.qkv + prod(entered) * self.shortcut + queries * self.proj
        return {
            "projections": projections + windows * prod(keys) * self.key,
            "attention": queries * (prod(keys) * self.pair + sum(keys) * self.rows),
            "feed": prod(grid) * self.feed,
        }


@dataclass(frozen=True)
class LayerWindows:
    """The grid of tokens that one block receives, and its windows.

    Attributes:
        step: patches along each axis that are one token behind this block.
        windows: how its attention divides the grid; None for a block that does not fit, which runs as it is.
        order: strides by which the tokens of the grid are reordered in the sequence (Hiera); () for row by row.
        pooling: what a block does that pools its tokens, and so runs as it is.
    """

    step: int
    windows: Windows | None
    order: tuple[Size, ...] = ()
    pooling: Pooling | None = None

    def grid(self, patches: Sequence[int]) -> Size:
        """Return the grid of tokens for a patch grid (…, h, w)."""
        height, width = patches[-2:]
        return -(-height // self.step), -(-width // self.step)

    def kind(self, patches: Sequence[int]) -> tuple[object, ...] | None:
        """Return what blocks with the same windows have in common; None for a block that does not merge."""
        if self.windows is None:
            return None
        size, shift = self.windows.on(self.grid(patches))
        return self.step, self.order, size, shift, any(shift) and self.windows.pads_first

    def sequence(self, grid: Size, device: torch.device) -> Tensor | None:
        """Return where the token of each cell of the grid, row by row, is in the sequence; None for the same place."""
        if not self.order:
            return None
        places = torch.arange(prod(grid), device=device).view(1, *grid)
        for rows, columns in self.order:
            _, height, width = places.shape
            places = places.view(-1, height // rows, rows, width // columns, columns)
            places = places.permute(0, 2, 4, 1, 3).flatten(0, 2)
        return places.flatten().argsort()


def segment_windows(layers: Sequence[LayerWindows]) -> Windows | None:
    """Return the windows that tokens of a packed sequence stay in; None where all tokens of an image see each other."""
    return next((one.windows for one in layers if one.windows is not None and one.windows.size is not None), None)


class WindowedAdapter(BlockAdapter, ABC):
    """The parts of a block whose attention runs inside windows; all other methods see tokens (B · windows, tokens, D).

    Padding are keys of a window that the block computes from zeros behind its first norm.
    """

    channels_first: bool = False
    """Whether tokens enter and leave as a map (B, D, h, w)."""

    @abstractmethod
    def windows(self, block: nn.Module) -> Windows | None:
        """Return how the attention of a block divides its grid; None where the block does not fit."""

    def window_position(self, block: nn.Module, tile: Tile) -> Position | None:
        """Return the position that acts inside the attention of a tile, whose padding are the last keys."""
        return None

    def row_weights(self, block: nn.Module) -> int:
        """Count the weights that multiply a token for each row and each column of its window, for its position."""
        return 0

    def mixing_weights(self, block: nn.Module) -> int:
        """Count the weights that multiply every place of the grid where a block mixes neighbors."""
        return 0

    def position_network(self, block: nn.Module) -> int:
        """Return the multiply-adds with which a block computes its position bias, once for all windows."""
        return 0


class WindowedNamedBlock(NamedBlock, WindowedAdapter):
    """A block described by its `BlockNames` whose attention runs inside windows."""


class DecomposedNamedBlock(WindowedNamedBlock):
    """A block with a vector for each distance of rows, and of columns, as in ViTDet: `DecomposedBias`."""

    biased = True

    def window_position(self, block: nn.Module, tile: Tile) -> Position | None:
        down, right = self.vectors(block)
        if down is None:
            return None
        rows, columns = tile.window
        return DecomposedBias(tile, vectors_between(down, rows), vectors_between(right, columns))

    def vectors(self, block: nn.Module) -> tuple[Any, Any]:
        """Return the vectors of distances along rows and columns (2 · side − 1, d); None where there are none."""
        attention = self._attention(block)
        return getattr(attention, "rel_pos_h", None), getattr(attention, "rel_pos_w", None)

    def row_weights(self, block: nn.Module) -> int:
        return 0 if self.vectors(block)[0] is None else prod(self.head_shape(block))

    def attend_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        return [find_part(block, path) for path in (*self.names.qkv_paths, self.names.proj)]


class WindowedTrunk(TrunkAdapter):
    """A trunk whose blocks have grids of their own; `layout` is that of the patches."""

    @abstractmethod
    def layer_windows(self, trunk: nn.Module) -> tuple[LayerWindows, ...]: ...

    def layout_in(self, trunk: nn.Module, layer: int, size: tuple[int, ...] | None = None) -> TokenLayout:
        return TokenLayout.of(grid=(1, *self.layer_windows(trunk)[layer].grid(self.layout(trunk, size).grid)))


def network_cost(attention: Any) -> int:
    """Return the multiply-adds of Swin V2's network ``cpb_mlp``, which runs on a table of relative positions."""
    places = prod(attention.relative_coords_table.shape[:-1])
    return places * sum(weight.numel() for weight in attention.cpb_mlp.parameters() if weight.dim() > 1)


@dataclass(frozen=True)
class WindowBias(RelativeBias):
    """The bias (H, tokens, tokens + padding) of a tile: padding are keys of their own, behind the tokens."""

    def bias(self, layer: int, positions: Tensor | None) -> Tensor | None:
        full = self.between(layer)
        if full is None or positions is None:
            return full
        shares, length = positions.unsqueeze(1), positions.shape[2]
        rows = shares @ full.to(shares.dtype)
        tokens = rows[..., :length] @ shares.transpose(-1, -2)
        return torch.cat([tokens, rows[..., length:]], -1).to(full.dtype)


@dataclass(frozen=True)
class DecomposedBias(Position):
    """A bias that depends on the queries: their products with a vector for the rows, and one for the columns, between.

    A merged query meets the mean of the vectors between its members and those of a key, weighted by size.

    Attributes:
        tile: the tile that it is for.
        rows: vector of each row of a window as seen from each row (rows, rows, d); columns likewise.
    """

    tile: Tile
    rows: Tensor
    columns: Tensor

    def coordinates(self, layout: TokenLayout, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the shares of unmerged tokens: each is itself."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.eye(layout.num_tokens, dtype=dtype, device=x.device).unsqueeze(0)

    def query_bias(self, layer: int, positions: Tensor | None, q: Tensor) -> Tensor:
        cells = torch.tensor(self.tile.cells(), device=q.device)
        axes = [
            self._along(table, cells[:, axis], positions, q) for axis, table in enumerate((self.rows, self.columns))
        ]
        return axes[0] + axes[1]

    def _along(self, table: Tensor, cells: Tensor, positions: Tensor | None, q: Tensor) -> Tensor:
        """Return the bias (B, H, N, N + padding) along one axis."""
        length = self.tile.tokens
        if positions is None:
            seen = torch.einsum("bhnc,nkc->bhnk", q, table[cells[:length]].to(q.dtype))
            return seen.index_select(3, cells)
        every = F.one_hot(cells, table.shape[0]).to(positions.dtype)
        shares = positions @ every[:length]
        from_rows = torch.einsum("bmr,rkc->bmkc", shares, table.to(shares.dtype)).to(q.dtype)
        seen = torch.einsum("bhmc,bmkc->bhmk", q, from_rows)
        tokens = seen @ shares.unsqueeze(1).transpose(-1, -2).to(q.dtype)
        return torch.cat([tokens, seen.index_select(3, cells[length:])], -1)


def vectors_between(table: Tensor, side: int) -> Tensor:
    """Return the vector of each cell of an axis as seen from each (side, side, d); the table is resized to fit."""
    if len(table) != 2 * side - 1:
        table = F.interpolate(table.T.unsqueeze(0), size=2 * side - 1, mode="linear")[0].T
    cells = torch.arange(side, device=table.device)
    return table[cells.unsqueeze(1) - cells + side - 1]


def relative_index(tile: Tile, device: torch.device) -> Tensor:
    """Return the index (tokens, tokens + padding) into a window's table of (2h − 1) · (2w − 1) relative positions."""
    cells = torch.tensor(tile.cells(), device=device)
    between, window = cells[: tile.tokens, None] - cells, tile.window
    return (between[..., 0] + window[0] - 1) * (2 * window[1] - 1) + between[..., 1] + window[1] - 1


def flat_tokens(x: Tensor, channels_first: bool = False) -> Tensor:
    """Return tokens (B, H, W, D), or (B, D, H, W), or (B, N, D), as (B, N, D)."""
    if x.dim() == 3:
        return x
    return x.flatten(2).transpose(1, 2) if channels_first else x.flatten(1, 2)
