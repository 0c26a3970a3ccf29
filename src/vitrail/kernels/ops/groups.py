"""Edges, places and members of groups: the steps of matchings, one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.kernels.ops.base import operator


@operator("best")
def best(
    x: Tensor, protected: int, penalty: Tensor | None, mask: Tensor | None, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Find each even token's most similar odd one by features (B, H, N, D): best (B, A) and partner (B, A)."""
    from vitrail.kernels import triton_matching

    return triton_matching.launch_best(x, protected, penalty, mask, present)


@best.op.register_fake
def _(x: Tensor, protected, penalty, mask, present) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return _edges(x, (x.shape[2] + 1) // 2)


@operator("best_given")
def best_given(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Find each even token's best odd one by float32 scores (B, A, C): best (B, A) and partner (B, A)."""
    from vitrail.kernels import triton_matching

    return triton_matching.launch_best_given(scores)


@best_given.op.register_fake
def _(scores: Tensor) -> tuple[Tensor, Tensor]:
    return _edges(scores, scores.shape[1])


def _edges(like: Tensor, evens: int) -> tuple[Tensor, Tensor]:
    shape = like.shape[0], evens
    return like.new_empty(shape, dtype=torch.float32), like.new_empty(shape, dtype=torch.int32)


@operator("settle")
def settle(
    best: Tensor,
    partner: Tensor,
    r: int,
    amount: Tensor | None,
    length: int,
    protected: int,
    mask: Tensor | None,
    present: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Merge the best edges (B, A); return the leader of each token's group (B, N) and the tokens left (B,)."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_settle(best, partner, r, amount, length, protected, mask, present)


@settle.op.register_fake
def _(best: Tensor, partner, r, amount, length, protected, mask, present) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    batch = best.shape[0]
    return best.new_empty(batch, length, dtype=torch.int32), best.new_empty(batch, dtype=torch.int32)


@operator("place")
def place(
    group: Tensor, kept: int, kinds: bool, protected: int, mask: Tensor | None, present: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Place the groups of leaders (B, N), int32; return target (B, N), member (B, N) and start (B, kept + 1)."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_place(group, kept, kinds, protected, mask, present)


@place.op.register_fake
def _(group: Tensor, kept: int, kinds, protected, mask, present) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return group.new_empty(group.shape, dtype=torch.int64), *_lists(group, kept)


@operator("list_members")
def list_members(target: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """List the members of each group of an index map (B, N): member (B, N) and start (B, kept + 1)."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_list(target, kept)


@list_members.op.register_fake
def _(target: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    return _lists(target, kept)


def _lists(like: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(like.shape, dtype=torch.int32), like.new_empty(like.shape[0], kept + 1, dtype=torch.int32)


@operator("first_members")
def first_members(target: Tensor) -> Tensor:
    """Return the first member (B, N), int32, of each token's group in an index map (B, N)."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_first(target)


@first_members.op.register_fake
def _(target: Tensor) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.int32)


@operator("ranks")
def ranks(values: Tensor) -> Tensor:
    """Return the rank (B, N) of float32 values, 0 for the largest; ties go to the lower index."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_rank(values)


@ranks.op.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.int64)


@operator("pairs")
def pairs(x: Tensor, among: Tensor, margin: float | None) -> Tensor:
    """Sum ELU(cos − margin) of each token with some others, or find the most similar of these: (B, N)."""
    from vitrail.kernels import triton_matching

    return triton_matching.launch_pairs(x, among, margin)


@pairs.op.register_fake
def _(x: Tensor, among, margin) -> Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[:2], dtype=torch.int64 if margin is None else torch.float32)


@operator("best_members")
def best_members(target: Tensor, rating: Tensor) -> Tensor:
    """Return True for the member (B, N) with the highest float32 rating of each group; ties go to the lower index."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_best_members(target, rating).view(torch.bool)


@best_members.op.register_fake
def _(target: Tensor, rating: Tensor) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.bool)


@operator("strongest_between")
def strongest_between(values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return the highest value of a map (B, h, w) on the lines from places (B, A, 2) to places (B, C, 2): (B, A, C)."""
    from vitrail.kernels import triton_groups

    return triton_groups.launch_strongest_between(values, sources, destinations)


@strongest_between.op.register_fake
def _(values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], sources.shape[1], destinations.shape[1])
