"""Cost model: multiply-adds of a model as a function of how many tokens each layer merges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.windows import Tile, WindowedAdapter, Windows
from vitrail.merging import Method, ToMe
from vitrail.runtime.checks import biased_layers
from vitrail.runtime.windows.tiling import Grid, Tiling


@dataclass(frozen=True)
class BlockCost:
    """Multiply-adds of one block.

    Attributes:
        attend: weights that multiply every token before the merge.
        feed: weights that multiply every token after it.
        pair: multiply-adds for every pair of tokens: the channels of all heads, twice, and talking heads.
        feature: channels by which tokens are compared.
        bias: heads with a position bias, which merged tokens pool: two products with the shares of all tokens.
        rows: weights that multiply a token for each row and each column of its window, for its position.
        mixing: weights that multiply every place of the grid, merged or not, where a block mixes neighbors.
        window: patches that attend to each other; None for all. Images are counted as whole windows.
    """

    attend: int
    feed: int
    pair: int
    feature: int
    bias: int = 0
    rows: int = 0
    mixing: int = 0
    window: int | None = None

    def attended(self, length: int, patches: int) -> float:
        """Return to how many of the present tokens each attends, of an input of this many patches."""
        return length if self.window is None or self.window >= patches else length * self.window / patches


@dataclass(frozen=True)
class CostModel:
    """Multiply-adds of matrix products and convolutions for one input.

    Attributes:
        per_patch: weights outside of blocks that multiply every patch.
        fixed: weights outside of blocks that are applied once.
        late: number of tokens that entered after the first block, for each block.
        behind: weights that are applied once for several patches, with how many (a projector to a language model).
        tiling: the windows of each block; None where attention sees all tokens.
        pairs_behind: multiply-adds for every pair of patches behind the blocks.
    """

    per_patch: int
    fixed: int
    blocks: tuple[BlockCost, ...]
    late: tuple[int, ...]
    behind: tuple[tuple[int, int], ...] = ()
    tiling: Tiling | None = None
    pairs_behind: int = 0

    @classmethod
    def of(cls, model: nn.Module, found: Found) -> CostModel:
        """Count the weights of a model by how often they are applied."""
        patch_parts, behind = found.adapter.patch_parts(found.trunk), found.adapter.behind(model, found.trunk)
        elsewhere, pooled = found.adapter.elsewhere(model, found.trunk), found.adapter.pooled_weights(found.trunk)
        roots = (*patch_parts, *(part for part, _ in behind), *elsewhere, *found.blocks)
        counted = {id(part) for root in roots for part in root.modules()}
        rest = [part for part in model.modules() if id(part) not in counted]
        return cls(
            per_patch=sum(map(_per_patch, patch_parts)) + pooled,
            fixed=_rest(rest) - pooled + sum(map(_position_network, found.block_adapters, found.blocks)),
            blocks=tuple(
                map(
                    _block_cost,
                    found.block_adapters,
                    found.blocks,
                    biased_layers(found),
                    _window_sizes(found),
                )
            ),
            late=late_tokens(found),
            behind=tuple((_weights(part), patches) for part, patches in behind),
            tiling=Tiling.of(found),
            pairs_behind=found.adapter.pairs_behind(model, found.trunk),
        )

    def parts(
        self,
        special: int,
        patches: int,
        per_layer: Sequence[int],
        side: Sequence[int] = (),
        read: bool = False,
        method: Method | None = None,
        grid: Grid | None = None,
    ) -> dict[str, int]:
        """Return the cost of one input by part, for the number of merges in each layer.

        ``side`` is the number of side tokens in each layer; with ``read``, the others attend to them. ``grid`` is the
        patch grid, which windows depend on.
        """
        method = ToMe() if method is None else method
        if self.tiling is not None:
            assert grid is not None
            return self._parts_in_windows(self.tiling, grid, per_layer, method)
        start = kept = special + patches
        extra = list(side) or [0] * len(per_layer)
        found = dict.fromkeys(("patches", "projections", "attention", "feed", "matching", "rest"), 0)
        behind = sum(weights * (patches // group) for weights, group in self.behind) + self.pairs_behind * patches**2
        found |= {"patches": self.per_patch * patches + behind, "rest": self.fixed}
        for block, r, late, more in zip(self.blocks, per_layer, self.late, extra, strict=True):
            length = kept + late
            if not isinstance(r, int) or r:  # a tensor while numbers are learned
                found["matching"] += self._matching(method, length, patches, block.feature)
            fed = length - r
            length = fed if method.place == "before" else length
            found["projections"] += (length + more) * block.attend
            found["attention"] += _whole(length * block.attended(length, patches)) * block.pair
            found["attention"] += more * (length + more) * block.pair
            found["attention"] += length * more * block.pair if read else 0
            found["attention"] += block.bias * length * start * (start + length) if length < start else 0
            kept -= 0 if method.scope == "block" else r
            found["feed"] += (fed + more) * block.feed
        return found

    def _parts_in_windows(self, tiling: Tiling, grid: Grid, per_layer: Sequence[int], method: Method) -> dict[str, int]:
        """Return the cost by part of blocks that merge inside windows; one that merges nothing runs as the model's."""
        patches = prod(grid)
        found = dict.fromkeys(("patches", "projections", "attention", "feed", "matching", "rest"), 0)
        behind = sum(weights * (patches // group) for weights, group in self.behind)
        found |= {"patches": self.per_patch * patches + behind, "rest": self.fixed}
        merges: list[tuple[Tile, tuple[int, ...]]] = []
        starts = {start for start, _ in tiling.runs(grid)}
        for index, block in enumerate(self.blocks):
            layer = tiling.layers[index]
            if index in starts:
                merges = []
            if layer.pooling is not None:
                for name, one in layer.pooling.cost(layer.grid(grid)).items():
                    found[name] += one
            elif layer.windows is None or not (merges or per_layer[index]):
                windows, size = (layer.windows or Windows()).padded(layer.grid(grid))
                cells = windows * prod(size)
                found["projections"] += cells * (block.attend + block.mixing)
                found["attention"] += cells * (prod(size) * block.pair + sum(size) * block.rows)
                found["feed"] += prod(layer.grid(grid)) * block.feed
            else:
                merges = merges or tiling.merges(method, grid, per_layer, index)
                for tile, removed in merges:
                    begins = 0 if method.scope == "block" else sum(removed[:index])
                    length, r = tile.tokens - begins, removed[index]
                    fed = length - r
                    if r:
                        found["matching"] += tile.count * method.flops(length, block.feature)
                    length = fed if method.place == "before" else length
                    found["projections"] += tile.count * (length * block.attend + tile.tokens * block.mixing)
                    pairs = length * (length + tile.padding)
                    found["attention"] += tile.count * (pairs * block.pair + self._position(block, tile, length))
                    found["feed"] += tile.count * fed * block.feed
        return found

    @staticmethod
    def _position(block: BlockCost, tile: Tile, length: int) -> int:
        """Return the cost of the position bias of a tile of merged tokens."""
        cells, width = tile.tokens + tile.padding, sum(tile.window)
        if block.rows:
            merged = length < tile.tokens
            shares = block.feature * sum(side * side for side in tile.window) if merged else 0
            return length * (block.rows * width + shares) + merged * length * length * block.bias * width
        return block.bias * length * tile.tokens * (cells + length) if length < tile.tokens else 0

    def _matching(self, method: Method, length: int, patches: int, feature: int) -> int:
        """Return the cost of a reduction, which happens inside windows where some block has them."""
        window = min((block.window for block in self.blocks if block.window is not None), default=patches)
        count = max(1, patches // window)
        return count * method.flops(length // count if count > 1 else length, feature)

    def total(
        self,
        special: int,
        patches: int,
        side: Sequence[int],
        read: bool,
        method: Method | None,
        grid: Grid,
        per_layer: Sequence[int],
    ) -> int:
        """Return the sum of `parts`."""
        return sum(self.parts(special, patches, per_layer, side, read, method, grid).values())


def late_tokens(found: Found) -> tuple[int, ...]:
    """Return the number of tokens that entered after the first block, for each block."""
    layouts = [found.adapter.layout_in(found.trunk, layer) for layer in range(len(found.blocks))]
    return tuple(layout.num_special - layouts[0].num_special for layout in layouts)


def _block_cost(parts: BlockAdapter, block: nn.Module, biased: bool, window: int | None) -> BlockCost:
    heads, channels = parts.head_shape(block)
    attend, feed = (sum(map(_weights, roots)) for roots in (parts.attend_parts(block), parts.feed_parts(block)))
    pair = 2 * heads * channels + parts.pair_weights(block)
    rows, mixing = (
        (parts.row_weights(block), parts.mixing_weights(block)) if isinstance(parts, WindowedAdapter) else (0, 0)
    )
    return BlockCost(attend, feed, pair, channels, heads if biased else 0, rows, mixing, window)


def _window_sizes(found: Found) -> list[int | None]:
    """Return, for each block, how many patches a window has; None where all tokens see each other."""
    layers = found.adapter.layer_windows(found.trunk)
    sizes = [None if one.windows is None or one.windows.size is None else prod(one.windows.size) for one in layers]
    return sizes or [None] * len(found.blocks)


def _position_network(parts: BlockAdapter, block: nn.Module) -> int:
    return parts.position_network(block) if isinstance(parts, WindowedAdapter) else 0


def _per_patch(root: nn.Module) -> int:
    """Count the weights that multiply a patch; a layer before a stride runs at each of the places that it skips."""
    times, total = 1, 0
    for part in reversed(list(root.modules())):
        total += times * _weights(part, recurse=False)
        times *= prod(part.stride) if isinstance(part, nn.Conv2d | nn.Conv3d) else 1
    return total


def _weights(module: nn.Module, recurse: bool = True) -> int:
    """Count the entries of a module's matrices and kernels: parameters of two or more axes, except position biases."""
    named = module.named_parameters(recurse=recurse)
    return sum(weight.numel() for name, weight in named if weight.dim() > 1 and "bias" not in name)


def _rest(parts: Iterable[nn.Module]) -> int:
    """Count the matrices outside of blocks: parameters called a weight, not tokens or positions."""
    return sum(
        weight.numel()
        for part in parts
        if not isinstance(part, nn.Embedding)
        for name, weight in part.named_parameters(recurse=False)
        if name.endswith("weight") and weight.dim() > 1
    )


def _whole(count: Any) -> Any:
    """Return a number of pairs as an integer; while numbers of merges are learned it is a tensor with gradients."""
    return count if isinstance(count, Tensor) else round(count)
