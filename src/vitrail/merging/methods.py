"""Ways to have fewer tokens. Token Merging is the one to use; the others are what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import Order, Protected, match

Matcher = Callable[[Tensor, int, Protected, Order], Assignment]
"""Says which tokens with features (B, N, D) go where: (features, how many, which must stay, order)."""


@dataclass(frozen=True)
class Pruning(Assignment):
    """A map by which tokens are left out instead of averaged: of each group only one member stays.

    ``stays`` is (B, N), true for one member of every group. Positions of tokens that went are given the one that
    stayed, so that a result still has every place.
    """

    stays: Tensor

    def merge_sizes(self, size: Tensor) -> Tensor:
        """Give the size of the member that stays."""
        return super().merge_sizes(size * self.stays)

    def merge(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """Give the member that stays."""
        return super().merge(x, (self.stays if size is None else size * self.stays).to(torch.float32))


def match_at_random(features: Tensor, r: int, protected: Protected = 0, order: Order = "paper") -> Assignment:
    """Merge ``r`` tokens at even positions into ones at odd positions, whichever they are."""
    return match(torch.randn_like(features), r, protected, order)


def prune(features: Tensor, r: int, protected: Protected = 0, order: Order = "paper") -> Assignment:
    """Leave out the tokens that Token Merging would merge into others."""
    step = match(features, r, protected, order)
    alone = step.merge_sizes(torch.ones_like(step.target)).gather(1, step.target) == 1
    odd = torch.arange(step.target.shape[1], device=alone.device) % 2 == 1  # those that others go into
    return Pruning(step.target, step.length, alone | odd)


METHODS: dict[str, Matcher] = {"tome": match, "random": match_at_random, "prune": prune}
"""Ways to have fewer tokens, by name."""
