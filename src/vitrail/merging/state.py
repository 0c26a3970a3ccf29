"""MergeState: what one forward pass knows about its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.errors import UnsupportedInput
from vitrail.merging.assignment import Assignment, insert
from vitrail.merging.bipartite import Order, Protected, mask_edges


@dataclass(frozen=True)
class MergeState:
    """Sizes, positions and the composed assignment of one forward pass.

    The state is never changed: :meth:`skip` and :meth:`merge` give the next one. It travels with the tokens, so
    that nothing is shared between two passes.

    Attributes:
        per_layer: how many tokens merge in each layer.
        layer: the layer that comes next.
        protected: which of the present tokens may not merge.
        order: how tokens are ordered after a merge.
        method: how it is found which tokens merge; one of ``METHODS``.
        size: members of each present token (B, N); None while all have one.
        log2_size: log₂ of it, where it is known already.
        assignment: where each original token is now; None while nothing merged.
        positions: coordinates of each present token (B, N, axes), where the model rotates by position.
    """

    per_layer: tuple[int, ...]
    layer: int = 0
    protected: Protected = 0
    order: Order = "paper"
    method: str = "tome"
    size: Tensor | None = None
    log2_size: Tensor | None = None
    assignment: Assignment | None = None
    positions: Tensor | None = None

    @property
    def r(self) -> int:
        """Tokens to merge in the layer that comes next."""
        return self.per_layer[self.layer]

    def skip(self) -> MergeState:
        """Go on to the next layer without merging."""
        return replace(self, layer=self.layer + 1)

    def possible(self, r: int) -> int:
        """Give how many of r tokens can merge: as many as there are pairs, where that depends on the data.

        Protected tokens that stand among the others keep their places in original order, so how many even
        positions are free is known only once earlier layers have merged.
        """
        if r == 0 or isinstance(self.protected, int) or self.order == "paper":
            return r
        if torch.compiler.is_compiling():
            raise UnsupportedInput(
                "protect= with order='original' leaves a number of tokens that depends on the picture, which "
                "cannot be compiled; use order='paper', or run without torch.compile"
            )
        return min(r, int(mask_edges(self.protected).min()))

    def merge(self, x: Tensor, step: Assignment) -> tuple[Tensor, MergeState]:
        """Merge tokens (B, N, D) by a step, and go on to the next layer."""
        merged, size, log2_size = step.merge_all(x, self.size)
        return merged, self.after(step, size, log2_size)

    def after(self, step: Assignment, size: Tensor, log2_size: Tensor | None = None) -> MergeState:
        """Give the state after a step that left tokens of these sizes."""
        return replace(
            self,
            layer=self.layer + 1,
            protected=self._protected_after(step),
            size=size,
            log2_size=log2_size,
            assignment=step if self.assignment is None else self.assignment.then(step),
            positions=None if self.positions is None else step.merge(self.positions, self.size),
        )

    def insert(self, places: Sequence[int]) -> MergeState:
        """Give the state after tokens that may not merge entered, at places of the sequence that has them."""
        count = len(places)

        def put(values: Tensor | None, value: float) -> Tensor | None:
            return None if values is None else insert(values, places, [value] * count)

        mask = self.protected
        return replace(
            self,
            protected=mask + count if isinstance(mask, int) else insert(mask, places, [True] * count),
            size=put(self.size, 1.0),
            log2_size=put(self.log2_size, 0.0),
            assignment=None if self.assignment is None else self.assignment.insert(places),
            positions=put(self.positions, 0.0),
        )

    def unmerge(self, x: Tensor) -> Tensor:
        """Give every original position its token: (B, N now, D) becomes (B, N at the start, D)."""
        return x if self.assignment is None else self.assignment.unmerge(x)

    def remerge(self, x: Tensor) -> Tensor:
        """Take full-length tokens back to the present ones, each the mean of its members."""
        return x if self.assignment is None else self.assignment.merge(x)

    def _protected_after(self, step: Assignment) -> Protected:
        if isinstance(self.protected, int):
            return self.protected
        mask = self.protected.expand_as(step.target)
        kept = torch.zeros(mask.shape[0], step.length, dtype=torch.long, device=mask.device)
        return kept.scatter_add(1, step.target, mask.long()) > 0
