"""Plan: what a merging does to a model, without the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter
from vitrail.errors import InvalidOption, SaturatedWarning, UnsupportedInput, VitrailWarning
from vitrail.merging import Room, Schedule, Solution
from vitrail.merging.bipartite import Order, mask_edges
from vitrail.runtime.cost import CostModel
from vitrail.runtime.side_tokens import Beside
from vitrail.tokens import TokenLayout


@dataclass
class Plan:
    """The settings of one merging, shared by the blocks of one model.

    A forward pass reads it once, at its first block; changing the schedule never touches a pass on its way.

    Attributes:
        layout: the model's tokens at its own input size.
        merges: whether it is a merging at all, and not only there for tokens that were added.
        added: tokens that go beside the model's own.
        method: how it is found which tokens merge.
        solved: merges per layer by number of patches, for the present schedule.
    """

    depth: int
    layout: TokenLayout
    schedule: Schedule
    proportional: bool
    order: Order
    unmerge: bool
    protect: Tensor | None
    cost: CostModel
    resizes: bool = False
    merges: bool = True
    added: Beside | None = None
    method: str = "tome"
    warned: set[int] = field(default_factory=set)
    hooks_reported: bool = False
    solved: dict[int, Solution] = field(default_factory=dict, repr=False)

    def change(self, schedule: Schedule) -> None:
        """Take another schedule for passes to come, if it can be met at the model's own size."""
        patches = self.layout.num_patches
        known = {}
        if self.protect is None or self.protect.shape[1] == patches:
            known[patches] = self._solve(schedule, patches)
        self.schedule, self.solved, self.warned = schedule, known, set()
        if not self.resizes:
            for solution in known.values():
                self.report(solution, patches)

    @classmethod
    def bare(cls, found: Found, cost: CostModel, added: Beside) -> Plan:
        """Make the plan of a model that does not merge and has tokens beside its own."""
        depth, layout = len(found.blocks), found.adapter.layout(found.trunk)
        resizes = found.adapter.resizes(found.trunk)
        nothing = Schedule.parse(depth, 0)
        return cls(depth, layout, nothing, True, "paper", True, None, cost, resizes, merges=False, added=added)

    def without_merging(self) -> Plan:
        """Give what is left of a plan when its merging is taken away."""
        nothing = Schedule.parse(self.depth, 0)
        return replace(
            self, schedule=nothing, proportional=True, order="paper", unmerge=True, protect=None, merges=False,
            method="tome", warned=set(), hooks_reported=False, solved={},
        )  # fmt: skip

    @property
    def pictures_decide(self) -> bool:
        """Whether how many pairs there are depends on what earlier layers merged.

        It does where protected patches keep their places among others that merge.
        """
        return self.protect is not None and self.order == "original"

    def solve(self, patches: int) -> Solution:
        """Merges per layer for an input of that many patches."""
        solved = self.solved
        if patches in solved:
            return solved[patches]
        solution = self._solve(self.schedule, patches)
        if not torch.compiler.is_compiling():
            solved[patches] = solution
        return solution

    def room(self, patches: int) -> Room:
        """How many of the tokens may merge when there are that many patches."""
        special = self.layout.num_special
        if self.protect is None:
            return Room(special + patches, special)
        if self.protect.shape[1] != patches:
            raise UnsupportedInput(
                f"protect= has {self.protect.shape[1]} entries for each picture, but this input has {patches} patches; "
                "give one entry per patch, row by row"
            )
        mask = _with_special(self.protect, special)
        return Room(special + patches, int(mask.sum(1).max()), int(mask_edges(mask).min()))

    def _solve(self, schedule: Schedule, patches: int) -> Solution:
        return schedule.solve(self.depth, self.room(patches), self.counter(self.layout.num_special, patches))

    def counter(self, special: int, patches: int) -> Callable[[Sequence[int]], int]:
        """Give the cost of one input as a function of the merges of each layer, with what was added."""
        if self.added is None:
            return self.cost.counter(special, patches)
        return self.cost.counter(special, patches, self.added.counts(), self.added.is_open)

    def report(self, solution: Solution, patches: int) -> None:
        """Warn, once for each size, where fewer tokens merge than were asked for."""
        if torch.compiler.is_compiling() or patches in self.warned:
            return
        if solution.missing:
            self.warned.add(patches)
            warnings.warn(
                f"{sum(solution.wanted)} merges were asked for and {sum(solution.per_layer)} are possible with "
                f"{patches} patches: {list(solution.per_layer)} merges per layer instead of {list(solution.wanted)}",
                SaturatedWarning,
                stacklevel=5,
            )
        elif self.schedule.gflops is not None and not any(solution.per_layer):
            self.warned.add(patches)
            warnings.warn(
                f"the model costs {(solution.cost or 0) / 1e9:.3g} GFLOPs without merging, which is within "
                f"gflops={self.schedule.gflops:g}: nothing merges",
                SaturatedWarning,
                stacklevel=5,
            )

    def report_hooks(self, attending: Sequence[nn.Module]) -> None:
        """Warn, once, about hooks on attention itself: its parts are called directly, so they never fire."""
        if self.hooks_reported or not any(part._forward_hooks or part._forward_pre_hooks for part in attending):
            return
        hooks = [h for part in attending for h in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        if any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks):
            self.hooks_reported = True
            warnings.warn(
                f"hooks on {type(attending[0]).__name__} do not run while the model is merged, because its parts are "
                "called directly; hook into those, into the block, or remove the merging",
                VitrailWarning,
                stacklevel=5,
            )

    def report_done(self, wanted: int, done: int, patches: int) -> None:
        """Warn, once for each size, where a pass merged fewer tokens than it was asked to."""
        if done < wanted and patches not in self.warned:
            self.warned.add(patches)
            warnings.warn(
                f"{wanted} merges were asked for and {done} were possible in this batch: protected patches keep "
                "their places in order='original', and not every pair between them exists",
                SaturatedWarning,
                stacklevel=5,
            )

    def protected(self, layout: TokenLayout, batch: int, device: torch.device) -> int | Tensor:
        """Which tokens of a batch may not merge."""
        if self.protect is None:
            return layout.num_special
        mask = _with_special(self.protect, layout.num_special).to(device)
        if mask.shape[0] not in (1, batch):
            raise UnsupportedInput(
                f"protect= has masks for {mask.shape[0]} pictures, but this batch has {batch}; give one mask per "
                "picture, or one for all"
            )
        return mask


@dataclass(frozen=True)
class BlockPlan:
    """What one block knows: the plan, its own place in it, whether no block follows, and how to find its parts.

    A block's forward asks for no place but the last, so that a compiler, which cuts it to what it asks, makes one of
    all blocks between the first and the last.
    """

    plan: Plan
    index: int
    is_last: bool
    parts: BlockAdapter


def _with_special(protect: Tensor, special: int) -> Tensor:
    return torch.cat([protect.new_ones(protect.shape[0], special), protect], 1)


def parse_protect(protect: Any, grid: tuple[int, int, int], resizes: bool) -> Tensor | None:
    """Check a user's mask over the patches, (P,), (B, P), (h, w) or (B, h, w), and give it as (1 or B, P).

    A model that takes other sizes than its own takes masks for them, too; they are checked with the input.
    """
    if protect is None:
        return None
    patches = prod(grid)
    try:
        mask = torch.as_tensor(protect)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOption(f"protect is a boolean mask over the patches; got {type(protect).__name__}") from error
    if mask.dim() in (2, 3) and tuple(mask.shape[-2:]) == grid[1:]:
        mask = mask.reshape(-1, patches)
    fits = mask.dim() in (1, 2) and mask.numel() > 0 and (resizes or mask.shape[-1] == patches)
    if mask.dtype != torch.bool or not fits:
        raise InvalidOption(
            f"protect is a boolean mask of shape (patches,) or (pictures, patches), with {patches} patches at the "
            f"model's own size; got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return mask.detach().cpu().reshape(-1, mask.shape[-1]).clone()
