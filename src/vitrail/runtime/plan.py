"""Plan: the settings of a merging, independent of the model's modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.adapters.base import BlockAdapter
from vitrail.errors import InvalidOption, SaturatedWarning, UnsupportedInput, VitrailWarning
from vitrail.merging import Method, Room, Schedule, Solution, ToMe
from vitrail.merging.bipartite import Order
from vitrail.merging.foresight import Foresight
from vitrail.merging.restoring import Restorer
from vitrail.merging.schedule import Capacity
from vitrail.runtime.cost import CostModel
from vitrail.runtime.side_tokens import SideTokens
from vitrail.tokens import TokenLayout


@dataclass
class Plan:
    """The settings of one merging, shared by the blocks of one model.

    A forward pass reads it once, at its first block; changing the schedule never affects a pass in progress.

    Attributes:
        layout: the model's tokens at its own input size.
        merges: False for a plan that only carries added tokens.
        added: tokens that run alongside the model's own.
        method: decides which tokens merge.
        solved: merges per layer by number of patches, for the present schedule.
        restorer: keeps what merges lose, and restores it; None: the method restores.
        foresight: predicts a guide from the tokens of an early layer.
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
    added: SideTokens | None = None
    method: Method = field(default_factory=ToMe)
    warned: set[int] = field(default_factory=set)
    hooks_reported: bool = False
    solved: dict[int, Solution] = field(default_factory=dict, repr=False)
    restorer: Restorer | None = None
    foresight: Foresight | None = None

    def change(self, schedule: Schedule) -> None:
        """Use another schedule for later passes, if the model's own input size allows it."""
        patches = self.layout.num_patches
        known = {}
        if self.protect is None or self.protect.shape[1] == patches:
            known[patches] = self._solve(schedule, patches)
        self.schedule, self.solved, self.warned = schedule, known, set()
        if not self.resizes:
            for solution in known.values():
                self.report(solution, patches)

    @classmethod
    def bare(cls, found: Found, cost: CostModel, added: SideTokens) -> Plan:
        """Return the plan of a model that does not merge and has added tokens."""
        depth, layout = len(found.blocks), found.adapter.layout(found.trunk)
        resizes = found.adapter.resizes(found.trunk)
        nothing = Schedule.parse(depth, 0)
        return cls(depth, layout, nothing, True, "paper", True, None, cost, resizes, merges=False, added=added)

    def without_merging(self) -> Plan:
        """Return the plan without its merging."""
        nothing = Schedule.parse(self.depth, 0)
        return replace(
            self, schedule=nothing, proportional=True, order="paper", unmerge=True, protect=None, merges=False,
            method=ToMe(), warned=set(), hooks_reported=False, solved={},
            restorer=None, foresight=None,
        )  # fmt: skip

    @property
    def images_decide(self) -> bool:
        """Whether the number of tokens depends on the images.

        It does for methods that are not static, and where protected patches keep their places among others that merge.
        """
        in_place = self.protect is not None and self.order == "original" and self.method.places_groups
        return in_place or not self.method.static

    def solve(self, patches: int) -> Solution:
        """Return the merges per layer for an input of this many patches."""
        solved = self.solved
        if patches in solved:
            return solved[patches]
        solution = self._solve(self.schedule, patches)
        if not torch.compiler.is_compiling():
            solved[patches] = solution
        return solution

    def room(self, patches: int) -> Room:
        """Return how many tokens can merge when there are this many patches."""
        special, method = self.layout.num_special, self.method
        restored = method.scope == "block"
        feasible: Capacity | None = None
        if type(method).feasible is not Method.feasible:
            grid = self.layout.grid if patches == self.layout.num_patches else (1, 1, patches)
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
        return Room(special + patches, int(mask.sum(1).max()), first, method.capacity, restored, feasible)

    def _solve(self, schedule: Schedule, patches: int) -> Solution:
        return schedule.solve(self.depth, self.room(patches), self.counter(self.layout.num_special, patches))

    def counter(self, special: int, patches: int) -> Callable[[Sequence[int]], int]:
        """Return the cost of one input as a function of the merges of each layer, added tokens included."""
        counts, is_open = ([], False) if self.added is None else (self.added.counts(), self.added.is_open)
        return self.cost.counter(special, patches, counts, is_open, self.method)

    def report(self, solution: Solution, patches: int) -> None:
        """Warn, once for each input size, where fewer tokens merge than requested."""
        if torch.compiler.is_compiling() or patches in self.warned:
            return
        if solution.missing:
            self.warned.add(patches)
            warnings.warn(
                f"{sum(solution.wanted)} merges were requested and {sum(solution.per_layer)} are possible with "
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
            self.warned.add(patches)
            warnings.warn(
                f"{wanted} merges were requested and {done} were possible in this batch: protected patches keep "
                "their places in order='original', and not every pair between them exists",
                SaturatedWarning,
                stacklevel=5,
            )

    def protected(self, layout: TokenLayout, batch: int, device: torch.device) -> int | Tensor:
        """Return which tokens of a batch must not merge."""
        if self.protect is None:
            return layout.num_special
        mask = _with_special(self.protect, layout.num_special).to(device)
        if mask.shape[0] not in (1, batch):
            raise UnsupportedInput(
                f"protect= has masks for {mask.shape[0]} images, but this batch has {batch}; pass one mask per "
                "image, or one for all"
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


def parse_protect(protect: Any, grid: tuple[int, int, int], resizes: bool) -> Tensor | None:
    """Return a user's protection mask over the patches as (1 or B, P); see :func:`parse_map` for the shapes."""
    if protect is None:
        return None
    mask = parse_map("protect", protect, grid, resizes)
    if mask.dtype != torch.bool:
        raise InvalidOption(
            f"protect is a boolean mask over the patches; got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return mask.cpu()


def parse_map(name: str, values: Any, grid: tuple[int, int, int], resizes: bool) -> Tensor:
    """Return a user's map over the patches, (P,), (B, P), (h, w) or (B, h, w), as (1 or B, P).

    Models that accept other input sizes accept maps for them too; these are checked with the input.
    """
    patches = prod(grid)
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOption(f"{name} is a map over the patches; got {type(values).__name__}") from error
    if found.dim() in (2, 3) and tuple(found.shape[-2:]) == grid[1:]:
        found = found.reshape(-1, patches)
    if found.dim() not in (1, 2) or found.numel() == 0 or not (resizes or found.shape[-1] == patches):
        raise InvalidOption(
            f"{name} is a map of shape (patches,) or (images, patches), with {patches} patches at the model's own "
            f"size; got {found.dtype} of shape {tuple(found.shape)}"
        )
    return found.detach().reshape(-1, found.shape[-1]).clone()
