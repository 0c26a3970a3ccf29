"""Attention rows inside windows, for recordings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.windows import LayerWindows, WindowedAdapter
from vitrail.merging.method import Projections
from vitrail.runtime.block_forward import pad_keys


def attention_in_windows(
    parts: BlockAdapter,
    block: nn.Module,
    layer: LayerWindows,
    patches: tuple[int, int, int],
    qkv: Projections,
    queries: Sequence[int],
    asked: tuple[int, int, int],
) -> Tensor:
    """Compute the attention rows (B, H, Q, N) of the tokens at some places, as an unmerged block has them.

    ``qkv`` are those of the block's grid (B, H, N, d), row by row; a row is 0 outside of the token's window. Queries
    are places in the grid ``asked``; the block's token is the first one there.
    """
    assert isinstance(parts, WindowedAdapter)
    assert layer.windows is not None
    (q, k, _), grid = qkv, layer.grid(patches)
    down, right = (-(-own // other) for own, other in zip(grid, asked[1:], strict=True))
    cells = [query // asked[2] * down * grid[1] + query % asked[2] * right for query in queries]
    rows = q.new_zeros(*q.shape[:2], len(cells), q.shape[2])
    scale = parts.attention_scale(block) or q.shape[-1] ** -0.5
    for tile in layer.windows.tiles(grid):
        position = parts.window_position(block, tile)
        for place in tile.places(q.device):
            here = {cell: index for index, cell in enumerate(place.tolist())}
            found = [index for index, cell in enumerate(cells) if cell in here]
            if not found:
                continue
            own = q[:, :, place]
            keys = (
                pad_keys(parts, block, k[:, :, place], k[:, :, place], tile.padding)[0]
                if tile.padding
                else k[:, :, place]
            )
            bias = None if position is None else position.query_bias(0, None, own)
            rows_here = [here[cells[index]] for index in found]
            scores = (own[:, :, rows_here] @ keys.transpose(-1, -2)) * scale
            weights = parts.weigh(block, scores, None if bias is None else bias[..., rows_here, :])
            full = rows.new_zeros(*rows.shape[:2], len(found), rows.shape[3])
            full[..., place] = weights[..., : len(place)]
            rows[:, :, found] = full
    return rows
