"""Inputs with more than 2³¹ elements, and launches with more programs than the second axis of a grid allows.

Only a few images are compared: the first, the last, and one in the middle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.cases import Merging, Outcome
from tests.kernels.checks import LIMITS, MATCHING_LIMIT, Draw, largest_error
from tests.kernels.structure import check_lists, check_places, shortfall
from vitrail.kernels import triton_attention, triton_matching, triton_merging
from vitrail.kernels import triton_attention_backward as triton_attention_back
from vitrail.merging import Assignment, proportional_attention

DTYPE = torch.float16


def attention_outcome(batch: int, length: int, heads: int, width: int, device: str) -> Outcome:
    """Attend over packed queries, keys and values."""
    packed = _packed(batch, length, heads, width, device)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    size = torch.randint(1, 5, (batch, length), device=device).float()
    out, sums = triton_attention.launch(q, k, v, size.log2(), width**-0.5, keep=True)
    assert sums is not None
    back = torch.empty_like(packed)
    into = (*back.permute(2, 0, 3, 1, 4),)
    triton_attention_back.launch(out, (q, k, v), size.log2(), out, sums, width**-0.5, into)  # type: ignore[arg-type]
    some = _some(batch, device)
    parts = [part[some].double().requires_grad_() for part in (q, k, v)]
    exact = proportional_attention(*parts, size[some].double()).transpose(1, 2).flatten(2)
    exact.backward(out[some].double())
    pairs = [(part[some], wanted.grad) for part, wanted in zip(into, parts, strict=True)]
    error = largest_error((out[some], exact.detach()), *pairs)  # type: ignore[arg-type]
    return Outcome("beyond", f"attention, {packed.numel():.1e} numbers, {batch * heads} heads", error, LIMITS[DTYPE])


def matching_outcome(batch: int, length: int, heads: int, width: int, device: str) -> Outcome:
    """Match by keys that lie between queries and values."""
    packed = _packed(batch, length, heads, width, device)
    _, k, _ = packed.permute(2, 0, 3, 1, 4)
    r, protected = 16, 1
    target, member, start = triton_matching.launch(k, r, protected)
    some = _some(batch, device)
    check_places(target[some], r, protected)
    check_lists(target[some], member[some].long(), start[some].long())
    short, _ = shortfall(k[some].double().mean(1), target[some], r, protected, MATCHING_LIMIT)
    return Outcome("beyond", f"matching of {length} tokens, {packed.numel():.1e} numbers", short, MATCHING_LIMIT)


def merging_outcome(batch: int, length: int, channels: int, device: str) -> Outcome:
    """Merge tokens, and compute gradients."""
    kept = length - 16
    one = Draw(Merging(batch=1), torch.device(device)).groups(length, kept, crowded=False)
    member, start = one.member.repeat(batch, 1), one.start.repeat(batch, 1)
    target = one.assignment.target.repeat(batch, 1)
    x = torch.empty(batch, length, channels, dtype=DTYPE, device=device).normal_()
    groups = triton_merging.Groups(None, member, start)
    out, size, _, _ = triton_merging.launch(x, groups)
    back = triton_merging.launch_backward(out, None, groups, size).x
    some = _some(batch, device)
    chosen = Assignment(target[some], kept)
    tokens = x[some].double().requires_grad_()
    exact = chosen.merge(tokens)
    exact.backward(out[some].double())
    assert tokens.grad is not None
    error = largest_error((out[some], exact.detach()), (back[some], tokens.grad))
    return Outcome("beyond", f"merging, {x.numel():.1e} numbers", error, LIMITS[DTYPE])


def _packed(batch: int, length: int, heads: int, width: int, device: str) -> Tensor:
    return torch.empty(batch, length, 3, heads, width, dtype=DTYPE, device=device).normal_()


def _some(batch: int, device: str) -> Tensor:
    return torch.tensor([0, batch // 2, batch - 1], device=device)
