"""Plan: the settings of a merging, independent of the model's modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._wording import counted
from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.windows import segment_windows
from vitrail.errors import InvalidOption, SaturatedWarning, UnsupportedInput, VitrailWarning
from vitrail.merging import Method, Room, Schedule, Solution, ToMe
from vitrail.merging.bipartite import Order
from vitrail.merging.foresight import Foresight
from vitrail.merging.restoring import Restorer
from vitrail.merging.schedule import Capacity
from vitrail.runtime.cost import CostModel
from vitrail.runtime.sequences.shortening import Shortening
from vitrail.runtime.side_tokens import SideTokens
from vitrail.runtime.windows.tiling import Tiling
from vitrail.tokens import TokenLayout

Grid = tuple[int, int, int]


@dataclass
class Plan:
    """The settings of one merging, shared by the blocks of one model.

    A forward pass reads it once, at its first block; changing the schedule never affects a pass in progress.

    Attributes:
        layout: the model's tokens at its own input size.
        merges: False for a plan that only carries added tokens.
        added: tokens that run alongside the model's own.
        method: decides which tokens merge.
        solved: merges per layer by number of patches, or by grid where that matters, for the present schedule.
        restorer: keeps what merges lose, and restores it; None: the method restores.
        foresight: predicts a guide from the tokens of an early layer.
        shortening: merges the tokens that a language model receives.

    Where attention runs inside windows, numbers of merges are those of the largest window (`Tiling`).
    """

    depth: int
    layout: TokenLayout
    cost: CostModel
    resizes: bool
    schedule: Schedule
    merges: bool = False
    proportional: bool = True
    order: Order = "paper"
    unmerge: bool = True
    protect: Tensor | None = None
    added: SideTokens | None = None
    method: Method = field(default_factory=ToMe)
    warned: set[int] = field(default_factory=set)
    hooks_reported: bool = False
    solved: dict[int | Grid, Solution] = field(default_factory=dict, repr=False)
    restorer: Restorer | None = None
    foresight: Foresight | None = None
    shortening: Shortening | None = None

    def change(self, schedule: Schedule) -> None:
        """Use another schedule for later passes, if the model's own input size allows it."""
        patches = self.layout.num_patches
        known: dict[int | Grid, Solution] = {}
        if self.protect is None or self.protect.shape[1] == patches:
            known[self._key(patches, self.layout.grid)] = self._solve(schedule, patches, self.layout.grid)
        self.schedule, self.solved, self.warned = schedule, known, set()
        if not self.resizes:
            for solution in known.values():
                self.report(solution, patches)

    @classmethod
    def bare(cls, found: Found, cost: CostModel, added: SideTokens | None) -> Plan:
        """Return the plan of a model that does not merge, and may have added tokens."""
        depth, layout = len(found.blocks), found.adapter.layout(found.trunk)
        return cls(depth, layout, cost, found.adapter.resizes(found.trunk), Schedule.parse(depth, 0), added=added)

    @property
    def images_decide(self) -> bool:
        """Whether the number of tokens depends on the images.

        It does for methods that are not static, and where protected patches keep their places among others that merge.
        """
        in_place = self.protect is not None and self.order == "original" and self.method.places_groups
        return in_place or not self.method.static

    def check_ready(self) -> None:
        """Raise if the method, the restorer or the network of foresight cannot run in its present state."""
        for part in (self.method, self.restorer, self.foresight):
            if part is not None:
                part.check_ready()

    def decision(self) -> tuple[Any, ...]:
        """Return what decides how many tokens merge, and may change between passes."""
        return self.schedule, tuple(self.method.counts()) if self.method.decides else ()

    def solve(self, patches: int, grid: Grid) -> Solution:
        """Return the merges per layer for an input of this many patches, in this grid."""
        solved, key = self.solved, self._key(patches, grid)
        if self.method.decides:  # and may have learned since
            return self._solve(self.schedule, patches, grid)
        if key in solved:
            return solved[key]
        solution = self._solve(self.schedule, patches, grid)
        if not torch.compiler.is_compiling():
            solved[key] = solution
        return solution

    def share(self, layout: TokenLayout, whole: TokenLayout) -> Solution:
        """Return the merges per layer for a window of an image: it keeps the share that the image does."""
        solution, patches = self.solve(whole.num_patches, whole.grid), layout.num_patches
        if self.images_decide or self.method.scope == "block":  # each number stands for itself
            wanted = tuple(-(-patches * min(r, whole.num_patches) // whole.num_patches) for r in solution.wanted)
        else:
            left = [whole.num_patches - sum(solution.per_layer[:layer]) for layer in range(self.depth + 1)]
            kept = [max(1, round(patches * one / whole.num_patches)) for one in left]
            wanted = tuple(before - after for before, after in pairwise(kept))
        return Solution(wanted, self.room(patches, layout.grid).cap(wanted))

    def merges_of(self, found: Found, layout: TokenLayout) -> tuple[int, ...]:
        """Return the merges per layer of an image, those of all its windows together where it has some."""
        windows = segment_windows(found.adapter.layer_windows(found.trunk)) if found.adapter.packed else None
        if windows is None:
            return self.solve(layout.num_patches, layout.grid).per_layer
        tiles = windows.tiles(layout.grid[1:])
        shares = [(self.share(layout.with_grid((1, *tile.shape)), layout).per_layer, tile.count) for tile in tiles]
        return tuple(sum(count * merges[layer] for merges, count in shares) for layer in range(self.depth))

    def _key(self, patches: int, grid: Grid) -> int | Grid:
        return patches if self.method.any_count and self.tiling is None else grid

    @property
    def tiling(self) -> Tiling | None:
        """The windows of the model's blocks; None where attention sees all tokens."""
        return self.cost.tiling

    def room(self, patches: int, grid: Grid) -> Room:
        """Return how many tokens can merge when there are this many patches, in this grid."""
        special, method = self.layout.num_special, self.method
        if self.tiling is not None:
            return self.tiling.room(method, grid)
        restored = method.scope == "block"
        feasible: Capacity | None = None
        if not method.any_count:
            feasible = partial(method.feasible, special=special, grid=grid)
        if self.protect is None:
            return Room(special + patches, special, None, method.capacity, restored, feasible)
        if self.protect.shape[1] != patches:
            raise UnsupportedInput(
                f"protect= has {self.protect.shape[1]} entries for each image, but this input has {patches} patches; "
                "pass one entry per patch, row by row"
            )
        mask = _with_special(self.protect, special)
        first = method.capacity(special + patches, mask)
        protected = int(mask.sum(1).max())
        return Room(special + patches, protected, first, method.capacity, restored, feasible, special)

    def _solve(self, schedule: Schedule, patches: int, grid: Grid) -> Solution:
        if self.method.decides:
            wanted = tuple(self.method.counts())
            return Solution(wanted, self.room(patches, grid).cap(wanted))
        counter = self.counter(self.layout.num_special, patches, grid)
        return schedule.solve(self.depth, self.room(patches, grid), counter)

    def counter(self, special: int, patches: int, grid: Grid) -> Callable[[Sequence[int]], int]:
        """Return the cost of one input as a function of the merges of each layer, added tokens included."""
        counts, is_open = ([], False) if self.added is None else (self.added.counts(), self.added.is_open)
        return partial(self.cost.total, special, patches, counts, is_open, self.method, grid)

    def lengths(self, layout: TokenLayout, per_layer: Sequence[int]) -> list[int]:
        """Return the number of tokens that leave each block; inside windows, that its MLP works on."""
        if self.tiling is not None:
            return self.tiling.lengths(self.method, layout.grid, per_layer)
        lengths, length = [], layout.num_tokens
        for merges, late in zip(per_layer, self.cost.late, strict=True):
            length -= 0 if self.method.scope == "block" else merges
            lengths.append(length + late)
        return lengths

    def fed(self, layout: TokenLayout, per_layer: Sequence[int]) -> list[set[int]]:
        """Return the lengths of the batches that each block's MLP works on: one, or one for each shape of window.

        None for a block inside windows where no token has merged, which runs as it is.
        """
        if self.tiling is not None:
            return [set(tiles.values()) for tiles in self.tiling.fed(self.method, layout.grid, per_layer)]
        removed = per_layer if self.method.scope == "block" else (0,) * self.depth
        lengths = self.lengths(layout, per_layer)
        return [{length - merges} for length, merges in zip(lengths, removed, strict=True)]

    def report(self, solution: Solution, patches: int) -> None:
        """Warn, once for each input size, where fewer tokens merge than requested."""
        if torch.compiler.is_compiling() or patches in self.warned:
            return
        if solution.missing:
            self._warn(
                patches,
                f"{sum(solution.wanted)} merges were requested and {sum(solution.per_layer)} are possible with "
                f"{patches} patches: {list(solution.per_layer)} merges per layer instead of {list(solution.wanted)}",
            )
        elif self.schedule.gflops is not None and not any(solution.per_layer):
            self._warn(
                patches,
                f"the model costs {(solution.cost or 0) / 1e9:.3g} GFLOPs without merging, which is within "
                f"gflops={self.schedule.gflops:g}: nothing merges",
            )

    def report_windows(self, whole: TokenLayout) -> None:
        """Warn, once for each input size, where merges are planned for an image and too few for any of its windows."""
        patches = whole.num_patches
        planned = sum(self.solve(patches, whole.grid).per_layer)
        if planned and self.method.static and patches not in self.warned:
            self._warn(
                patches,
                f"{planned} merges were requested for an image of {patches} patches, which is less than half a token "
                "in each window: nothing merges. Tokens of this model merge inside windows; request more",
            )

    def _warn(self, patches: int, message: str) -> None:
        self.warned.add(patches)
        warnings.warn(message, SaturatedWarning, stacklevel=6)

    def report_hooks(self, attending: Sequence[nn.Module]) -> None:
        """Warn, once, about hooks on attention modules: their parts are called directly, so the hooks never run."""
        if self.hooks_reported or not any(part._forward_hooks or part._forward_pre_hooks for part in attending):
            return
        hooks = [h for part in attending for h in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        libraries = {type(part).__module__.partition(".")[0] for part in attending}  # a library's own hooks do no harm
        if any(getattr(hook, "__module__", "").partition(".")[0] not in libraries for hook in hooks):
            self.hooks_reported = True
            warnings.warn(
                f"hooks on {type(attending[0]).__name__} do not run while the model is merged, because its parts are "
                "called directly; hook its parts or the block instead, or remove the merging",
                VitrailWarning,
                stacklevel=5,
            )

    def report_done(self, wanted: int, done: int, patches: int) -> None:
        """Warn, once for each input size, where a pass merged fewer tokens than requested."""
        if done < wanted and patches not in self.warned:
            self._warn(
                patches,
                f"{wanted} merges were requested and {done} were possible in this batch: protected patches keep "
                "their places in order='original', and not every pair between them exists",
            )

    def protected(self, layout: TokenLayout, batch: int, device: torch.device) -> int | Tensor:
        """Return which tokens of a batch must not merge."""
        if self.protect is None:
            return layout.num_special
        mask = _with_special(self.protect, layout.num_special).to(device)
        if mask.shape[0] not in (1, batch):
            raise UnsupportedInput(
                f"protect= has masks for {counted(mask.shape[0], 'image')}, but this batch has {batch}; pass one mask "
                "per image, or one for all"
            )
        return mask


@dataclass(frozen=True)
class BlockPlan:
    """The plan as seen by one block: the plan, its index, whether it is the last block, and its adapter.

    A block's forward reads no index but ``is_last``: a compiler specializes on what is read, so all blocks between the
    first and the last share one compiled graph.
    """

    plan: Plan
    index: int
    is_last: bool
    parts: BlockAdapter


def _with_special(values: Tensor, special: int) -> Tensor:
    return torch.cat([values.new_ones(values.shape[0], special), values], 1)


def parse_map(name: str, values: Any, grid: tuple[int, int, int], resizes: bool) -> Tensor:
    """Return a user's map over the patches, (P,), (B, P), (h, w) or (B, h, w), as (1 or B, P).

    Models that accept other input sizes accept maps for them too; these are checked with the input.
    """
    patches = prod(grid)
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOption(f"{name} is a map over the patches; got {type(values).__name__}") from error
    if found.is_complex() or (found.is_floating_point() and not bool(found.isfinite().all())):
        values = "complex" if found.is_complex() else "NaN or infinite"
        raise InvalidOption(
            f"{name} is a map of real, finite numbers over the patches; got {values} values. Pass its absolute value, "
            "or torch.nan_to_num of it"
        )
    if found.dim() in (2, 3) and tuple(found.shape[-2:]) == grid[1:]:
        found = found.reshape(-1, patches)
    if found.dim() not in (1, 2) or found.numel() == 0 or not (resizes or found.shape[-1] == patches):
        raise InvalidOption(
            f"{name} is a map of shape (patches,) or (images, patches), with {patches} patches at the model's own "
            f"size; got {found.dtype} of shape {tuple(found.shape)}"
        )
    return found.detach().reshape(-1, found.shape[-1]).clone()
