"""Prune: keeps one token of each group that another method would merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import Protected
from vitrail.merging.features import Features
from vitrail.merging.method import Context, Method, ModelShape, Reduction, as_method, register_method
from vitrail.merging.methods.tome import ToMe


@register_method("prune")
class Prune(Method):
    """Keep one token of each group of another method and drop the rest: pruning against merging with equal groups.

    With ToMe's matching (also that of ``random`` and ``mlerp``) the destination stays, otherwise the largest member;
    ties go to the lower index. The positions of dropped tokens are restored from the token that stays.

    Args:
        matcher: the method whose groups are pruned: a registered name, a dict with a name and options, or an instance.
        features: short for ``matcher=ToMe(features)``.
    """

    def __init__(self, matcher: str | Mapping[str, Any] | Method = "tome", features: Features | None = None) -> None:
        super().__init__()
        if features is not None and matcher != "tome":
            raise InvalidOption(
                f"features belong to the matcher: matcher={{'name': ..., 'features': {features!r}}}; got features and "
                f"matcher={matcher!r}"
            )
        self.matcher = as_method(matcher) if features is None else ToMe(features)
        if isinstance(self.matcher, Prune):
            raise InvalidOption("matcher is a method that forms groups, such as 'tome'; got 'prune' itself")
        self.static, self.place, self.scope = self.matcher.static, self.matcher.place, self.matcher.scope  # type: ignore[misc]
        self.places_groups, self.keeps_grid = self.matcher.places_groups, self.matcher.keeps_grid  # type: ignore[misc]

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.matcher.config == "tome" else {"matcher": self.matcher.config}

    @property
    def any_count(self) -> bool:
        return self.matcher.any_count

    def check(self, shape: ModelShape) -> None:
        self.matcher.check(shape)

    def build(self, shape: ModelShape) -> None:
        self.matcher.build(shape)

    def check_ready(self) -> None:
        self.matcher.check_ready()

    def layers(self, depth: int) -> Sequence[float] | None:
        return self.matcher.layers(depth)

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        return self.matcher.maps(inputs, grid)

    def feasible(self, r: int, tokens: int, special: int, grid: tuple[int, int, int]) -> int:
        return self.matcher.feasible(r, tokens, special, grid)

    def capacity(self, tokens: int, protected: Protected) -> int:
        return self.matcher.capacity(tokens, protected)

    def amount(self, context: Context, planned: int) -> int | Tensor:
        return self.matcher.amount(context, planned)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        reduction = self.matcher.reduce(context, r)
        if reduction is None:
            return None
        if reduction.soft is not None:
            raise InvalidOption(
                f"prune needs groups, and {self.matcher.label} returned a relaxed assignment, as it does in training; "
                "call model.eval() first"
            )
        prefer = prefer_destinations(context) if isinstance(self.matcher, ToMe) else None
        return replace(reduction, weight=weight_of_one(context, reduction, prefer), size=None)

    def restore(
        self, x: Tensor, assignment: Assignment, memory: Mapping[str, Tensor], archive: Mapping[str, Tensor]
    ) -> Tensor:
        return self.matcher.restore(x, assignment, memory, archive)

    def flops(self, tokens: int, head_width: int) -> int:
        return self.matcher.flops(tokens, head_width)

    def loss(self) -> Tensor | None:
        return self.matcher.loss()


def prefer_destinations(context: Context) -> Tensor:
    """Return 1 for destinations of ToMe's matching (B, N), which are at odd positions, and 0 for others."""
    return (torch.arange(context.x.shape[1], device=context.x.device) % 2).expand(context.x.shape[:2])


def weight_of_one(context: Context, reduction: Reduction, preference: Tensor | None = None) -> Tensor:
    """Return weights (B, N) that keep one token of each group, with its size, and drop the others (weight 0).

    The member of the highest preference (B, N) stays, by default the largest one; ties go to the lower index. Padding,
    and tokens that the reduction drops itself, stay only where there is no other.
    """
    step, shape = reduction.assignment, context.x.shape[:2]
    work = torch.promote_types(context.x.dtype, torch.float32)
    size = torch.ones(shape, dtype=work, device=context.x.device) if context.size is None else context.size
    rating = (size if preference is None else preference.to(work)).detach()
    dropped = size == 0 if reduction.weight is None else (size == 0) | (reduction.weight == 0)
    rating = rating.masked_fill(dropped, -1)
    return step.best_members(rating) * size
