"""Merging inside windows: each tile of a window is reduced as an image of its own, by the method and by its share.

A block takes the tokens of the grid apart into tiles and runs on these. Tokens stay merged in the following blocks that
have the same windows; behind the last of these, every place of the grid has a token again. A block that merges nothing
runs as the library's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall
from vitrail.adapters.forward_pass import CARRIER, Pass, current_pass
from vitrail.adapters.windows import LayerWindows, Tile, WindowedAdapter, flat_tokens
from vitrail.errors import BrokenPass
from vitrail.merging import Assignment, MergeState
from vitrail.runtime.block_forward import Carried
from vitrail.runtime.carry import MergedBlock, Slot, planned, refuse_changes
from vitrail.runtime.guide import current_guide, method_maps
from vitrail.runtime.plan import BlockPlan, Plan
from vitrail.runtime.side_tokens import SideTokens
from vitrail.runtime.trace import TracedPass, is_tracking, record, update
from vitrail.runtime.windows.tiling import Tiling
from vitrail.tokens import TokenLayout

_UNCHANGED = "runs as it is"
"""Stands for the state of a pass on the tokens of a block that merges nothing."""


class WindowedBlock(MergedBlock):
    """Mixin in front of a library's block whose attention runs inside windows."""

    def _vitrail_receive(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried | None:
        return _receive(self._vitrail, self, x)  # type: ignore[arg-type]

    def forward(self, x: Tensor, *args: Any, vitrail_slot: Slot | None = None, **kwargs: Any) -> Any:
        if vitrail_slot is None:
            return super(MergedBlock, self).forward(x, *args, **kwargs)  # type: ignore[misc]
        return super().forward(x, *args, vitrail_slot=vitrail_slot, **kwargs)


@dataclass(frozen=True)
class WindowCarried(Carried):
    """The state of a run of blocks: those of the batches of its tiles.

    The state of the first batch stands for all, where only the layer is read.

    Attributes:
        tiles: the tiles that make a batch each.
        batches: their states.
        places: where the tokens of all tiles, one behind the other, are in the sequence of an image.
        shape: shape of the tokens as the model passes them.
        channels_first: whether these are maps (B, D, h, w).
        lengths: number of tokens present in each tile; None where the tokens are as the model passes them.
        begun: the block that began this run.
        last: the block that ends it.
    """

    tiles: tuple[Tile, ...] = ()
    batches: tuple[Carried, ...] = ()
    places: Tensor | None = None
    shape: tuple[int, ...] = ()
    channels_first: bool = False
    lengths: tuple[int, ...] | None = None
    begun: int = 0
    last: int = 0

    def run(self, parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall) -> tuple[Tensor, Carried]:
        assert isinstance(parts, WindowedAdapter)
        outputs, after = [], []
        for one, tile, tokens in zip(self.batches, self.tiles, self._split(x), strict=True):
            placed = replace(one, position=parts.window_position(block, tile))
            output, carried = placed.run(parts, block, tokens, call)
            outputs.append(output)
            after.append(carried)
        lengths = tuple(output.shape[1] for output in outputs)
        state = replace(self, state=after[0].state, batches=tuple(after), lengths=lengths, tokens=None)
        return self._join(outputs), state

    def restore(self, x: Tensor) -> Tensor:
        pieces = zip(self.batches, self._split(x), strict=True)
        return self._replace([one.restore(tokens) for one, tokens in pieces])

    def unmerge(self, x: Tensor) -> Tensor:
        pieces = zip(self.batches, self._split(x), strict=True)
        return self._replace([one.unmerge(tokens) for one, tokens in pieces])

    def remerge(self, x: Tensor) -> Tensor:
        pieces = replace(self, lengths=None)._split(x)
        return self._join([one.remerge(tokens) for one, tokens in zip(self.batches, pieces, strict=True)])

    def ends(self, mine: BlockPlan) -> bool:
        return mine.index == self.last

    def enter(self, added: SideTokens, layer: int, x: Tensor) -> Carried:
        raise BrokenPass("added tokens do not run inside windows")

    def sent(self, tokens: Tensor | None) -> Carried:
        return replace(self, batches=tuple(one.sent(None) for one in self.batches), tokens=tokens)

    def record(self, out: Tensor) -> None:
        layer, grid = self.state.layer - 1, self.layout.grid
        target, size = self._groups(self._tiling.layers[layer], grid)
        state = MergeState((), assignment=Assignment(target, size.shape[1]), size=size)
        update(self.plan, lambda traced: replace(traced, state=replace(state, lengths=traced.state.lengths)))

    @property
    def _tiling(self) -> Tiling:
        assert self.plan.tiling is not None
        return self.plan.tiling

    def _split(self, x: Tensor) -> list[Tensor]:
        """Return the present tokens of each batch of tiles (B · tiles, N, D)."""
        lengths = self.lengths
        if lengths is None:
            x = flat_tokens(x, self.channels_first).index_select(1, self._places)
            lengths = tuple(tile.tokens for tile in self.tiles)
        counts = [tile.count for tile in self.tiles]
        pieces = x.split([count * length for count, length in zip(counts, lengths, strict=True)], 1)
        return [piece.reshape(-1, length, x.shape[2]) for piece, length in zip(pieces, lengths, strict=True)]

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the tokens of all tiles, one behind the other (B, …, D)."""
        batch = self.shape[0]
        shapes = [(batch, tile.count * piece.shape[1]) for tile, piece in zip(self.tiles, pieces, strict=True)]
        joined = [piece.reshape(*shape, piece.shape[2]) for piece, shape in zip(pieces, shapes, strict=True)]
        return joined[0] if len(joined) == 1 else torch.cat(joined, 1)

    def _replace(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the tokens of whole tiles as the model passes them."""
        joined = self._join(pieces).index_select(1, self._places.argsort())
        if self.channels_first:
            return joined.transpose(1, 2).reshape(self.shape)
        return joined.view(*self.shape[:-1], joined.shape[2])

    @property
    def _places(self) -> Tensor:
        assert self.places is not None
        return self.places

    def _groups(self, layer: LayerWindows, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Return the group of each patch of an image (B, patches), and the number of patches in each (B, groups)."""
        batch, first, indices = self.shape[0], 0, []
        for one, tile in zip(self.batches, self.tiles, strict=True):
            length = tile.tokens if one.state.assignment is None else one.state.assignment.length
            target = one.state.to_original(
                torch.arange(length, device=self._places.device).expand(batch * tile.count, -1).unsqueeze(2)
            )
            start = first + length * torch.arange(tile.count, device=target.device).view(1, -1, 1)
            indices.append((target.view(batch, tile.count, -1) + start).flatten(1))
            first += tile.count * length
        height, width = layer.grid(grid)
        found = torch.cat(indices, 1).new_empty(batch, height * width)
        places = torch.cat([tile.places(found.device).flatten() for tile in self.tiles])
        found = found.index_copy(1, places, torch.cat(indices, 1)).view(batch, height, width)
        found = found.repeat_interleave(layer.step, 1).repeat_interleave(layer.step, 2)
        found = found[:, : grid[1], : grid[2]].flatten(1)
        return found, torch.zeros(batch, first, device=found.device).scatter_add(
            1, found, torch.ones(found.shape, device=found.device)
        )


def _receive(mine: BlockPlan, block: nn.Module, x: Tensor) -> Carried | None:
    """Return the state that the incoming tokens carry, or a new one; None for a block that merges nothing."""
    carried: Any = getattr(x, CARRIER, None)
    # gradient checkpointing repeats a block on the tokens that it had
    repeated = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    if carried is _UNCHANGED and repeated:
        return None
    continues = isinstance(carried, WindowCarried) and carried.plan is mine.plan and carried.state.layer == mine.index
    if continues and (repeated or carried.begun < mine.index):
        return carried
    carried = _begin(mine, block, x)
    setattr(x, CARRIER, _UNCHANGED if carried is None else carried)
    return carried


def _begin(mine: BlockPlan, block: nn.Module, x: Tensor) -> WindowCarried | None:
    """Start a run with this block, if it merges anything."""
    plan, entered = mine.plan, current_pass()
    if entered is None or getattr(entered.trunk, "_vitrail_plan", None) is not plan:
        entered = Pass(None, plan.layout)
    elif mine.index == 0:
        refuse_changes(plan, entered)
    layout, tiling = entered.layout, plan.tiling
    assert tiling is not None
    per_layer = planned(plan, layout)
    if mine.index == 0 and is_tracking():
        _begin_trace(plan, layout, per_layer, x)
    if not per_layer[mine.index]:
        return None
    grid = tiling.layers[mine.index].grid(layout.grid)
    run, stop = tiling.run(layout.grid, mine.index)
    assert isinstance(mine.parts, WindowedAdapter)
    if flat_tokens(x, mine.parts.channels_first).shape[1] != prod(grid) or any(per_layer[run : mine.index]):
        raise BrokenPass(
            f"block {mine.index} of a merged model received tokens of shape {tuple(x.shape)} without the state of "
            f"their pass, where it expects a grid of {grid[0]} × {grid[1]} for this input. Something between the "
            "blocks replaced the tensor, or the model's input size changed after merging"
        )
    windows, known = mine.parts.windows(block), tiling.layers[mine.index].windows
    if windows is None or known is None or windows.on(grid) != known.on(grid):
        raise BrokenPass(
            f"the windows of block {mine.index} changed after merging; remove the merging before the model's window or "
            "input size is changed, and merge again"
        )
    plan.check_ready()
    merges = tiling.merges(plan.method, layout.grid, per_layer, mine.index)
    sequence = tiling.layers[mine.index].sequence(grid, x.device)
    guide = current_guide(plan, layout, x.shape[0], x.device)
    guide |= method_maps(plan.method, layout, entered.inputs, x)
    guide = {name: _at_layer(values, layout, grid, tiling.layers[mine.index].step) for name, values in guide.items()}
    batches, places = [], []
    for tile, own in merges:
        place = tile.places(x.device)
        batches.append(_begin_tile(mine, tile, own, entered, _of_tile(guide, place)))
        places.append((place if sequence is None else sequence[place]).flatten())
    first: dict[str, Any] = {name: getattr(batches[0], name) for name in Carried.__dataclass_fields__}
    first |= {"layout": layout, "padding": 0}
    return WindowCarried(
        **first,
        tiles=tuple(tile for tile, _ in merges),
        batches=tuple(batches),
        places=torch.cat(places),
        shape=tuple(x.shape),
        channels_first=mine.parts.channels_first,
        begun=mine.index,
        last=stop - 1,
    )


def _begin_tile(
    mine: BlockPlan, tile: Tile, per_layer: tuple[int, ...], entered: Pass, guide: Mapping[str, Tensor]
) -> Carried:
    layout = TokenLayout((), (1, *tile.shape))
    state = MergeState(per_layer, mine.index, 0, guide=guide, grid=layout.grid)
    return Carried(mine.plan, layout, state, state.r, None, entered.expose, padding=tile.padding)


def _at_layer(values: Tensor, layout: TokenLayout, grid: tuple[int, int], step: int) -> Tensor:
    """Return a map over the patches (B, P, …) as the mean over the patches of each token of a coarser grid."""
    if step == 1:
        return values
    cells = values.reshape(len(values), *layout.grid[1:], -1).permute(0, 3, 1, 2)
    pooled = F.avg_pool2d(cells, step, ceil_mode=True, count_include_pad=False).permute(0, 2, 3, 1)
    return pooled.reshape(len(values), prod(grid), *values.shape[2:])


def _of_tile(guide: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    return {name: values[:, places].flatten(0, 1) for name, values in guide.items()}


def _begin_trace(plan: Plan, layout: TokenLayout, per_layer: Sequence[int], x: Tensor) -> None:
    """Record a pass in which no patch has merged yet."""
    batch, lengths = x.shape[0], plan.lengths(layout, per_layer)
    state = MergeState((), lengths=tuple(torch.full((batch,), length, device=x.device) for length in lengths))
    flops = plan.counter(layout.num_special, layout.num_patches, layout.grid)(per_layer)
    record(plan, TracedPass(layout, state, batch, x.device, flops))
