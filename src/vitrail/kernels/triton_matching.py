"""Matching without a sort: similarity, best partner, and places found by counting.

Everything a step needs is counted from three short vectors per image (best score, partner, merged or not), so
there is no sort, no scatter and no atomic: the same input gives the same bits.

    _metric    keys ─► mean over heads, unit norm                      (B, N, D)
    _best      each even token's most similar odd token                (B, A)
    _choose    the r best edges: rank = edges that come before         (B, A)
    _place     where each token goes, and the members of each group    (B, N)

A = ⌈N/2⌉ tokens are at even positions, C = ⌊N/2⌋ at odd ones; the first P tokens are protected. The result has the P
protected tokens first, then the A − ⌈P/2⌉ − r even ones that stay, then the C − ⌊P/2⌋ odd ones, each in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching

WHOLE = 256
"""Longest sequence that one program matches alone."""


@triton.jit(do_not_specialize=["heads", "length"])
def _metric(
    k_ptr, out_ptr, k_b, k_h, k_n, heads, length,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D_PAD)
    mask = (rows < length)[:, None] & (channel < D)[None, :]
    at = k_ptr + batch * k_b + rows[:, None] * k_n + channel[None, :]
    acc = tl.zeros([BLOCK, D_PAD], tl.float32)
    for head in range(heads):
        acc += tl.load(at + head * k_h, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (batch * length + rows[:, None]) * D + channel[None, :], _unit(acc / heads), mask=mask)


@triton.jit(do_not_specialize=["length", "protected"])
def _best(
    metric_ptr, best_ptr, partner_ptr, length, protected,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    evens = (length + 1) // 2
    odds = length // 2
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    base = metric_ptr + batch * length * D
    left = tl.load(
        base + (2 * a[:, None]) * D + channel[None, :], mask=(a < evens)[:, None] & inside[None, :], other=0.0
    )
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    partner = tl.zeros([BLOCK_A], tl.int32)
    for start in range(0, odds, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        right = tl.load(
            base + (2 * c[None, :] + 1) * D + channel[:, None], mask=(c < odds)[None, :] & inside[:, None], other=0.0
        )
        scores = tl.dot(left, right, input_precision="tf32x3")
        scores = tl.where(scores != scores, -3.4028234663852886e38, scores)
        open_pairs = (2 * a >= protected)[:, None] & ((2 * c + 1 >= protected) & (c < odds))[None, :]
        scores = tl.where(open_pairs, scores, float("-inf"))
        peak, where = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
        better = peak > best
        partner = tl.where(better, start + where.to(tl.int32), partner)
        best = tl.where(better, peak, best)
    tl.store(best_ptr + batch * evens + a, best, mask=a < evens)
    tl.store(partner_ptr + batch * evens + a, partner, mask=a < evens)


@triton.jit(do_not_specialize=["evens", "r"])
def _choose(best_ptr, merges_ptr, evens, r, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    mine = tl.load(best_ptr + batch * evens + a, mask=a < evens, other=float("-inf"))
    ahead = tl.zeros([BLOCK_A, BLOCK_J], tl.int32)
    for start in range(0, evens, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(best_ptr + batch * evens + j, mask=j < evens, other=float("-inf"))
        ahead += _comes_before(other, j, mine, a, evens)
    rank = tl.sum(ahead, 1)
    tl.store(merges_ptr + batch * evens + a, (rank < r).to(tl.int32), mask=a < evens)


@triton.jit
def _comes_before(other, j, mine, a, evens):
    """Return whether edge j precedes edge a in descending order, ties by lower index: (A, J) of 0 and 1."""
    larger = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < a[:, None]))
    return (larger & (j < evens)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["length", "protected", "r"])
def _place(
    partner_ptr, merges_ptr, target_ptr, member_ptr, start_ptr, length, protected, r,
    BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    evens = (length + 1) // 2
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    c = a  # this program also places the odd tokens of the same numbers
    is_even = a < evens
    partner = tl.load(partner_ptr + batch * evens + a, mask=is_even, other=0)
    merges = tl.load(merges_ptr + batch * evens + a, mask=is_even, other=0) > 0

    merged_before = tl.zeros([BLOCK_A, BLOCK_J], tl.int32)  # merged even tokens before this one
    in_front = tl.zeros([BLOCK_A, BLOCK_J], tl.int32)  # ... that are members before it, in its group or an earlier one
    into_lower = tl.zeros([BLOCK_A, BLOCK_J], tl.int32)  # merged even tokens whose partner comes before odd token c
    for start in range(0, evens, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        there = tl.load(partner_ptr + batch * evens + j, mask=j < evens, other=0)[None, :]
        merged = (tl.load(merges_ptr + batch * evens + j, mask=j < evens, other=0) > 0)[None, :]
        before = merged & (j[None, :] < a[:, None])
        merged_before += before.to(tl.int32)
        in_front += ((merged & (there < partner[:, None])) | (before & (there == partner[:, None]))).to(tl.int32)
        into_lower += (merged & (there < c[:, None])).to(tl.int32)
    merged_before = tl.sum(merged_before, 1)
    in_front = tl.sum(in_front, 1)
    into_lower = tl.sum(into_lower, 1)

    _write_places(
        target_ptr, member_ptr, start_ptr, batch, a, partner, merges, merged_before, in_front, into_lower,
        length, protected, r,
    )  # fmt: skip


@triton.jit
def _write_places(
    target_ptr, member_ptr, start_ptr, batch, a, partner, merges, merged_before, in_front, into_lower,
    length, protected, r,
):  # fmt: skip
    evens = (length + 1) // 2
    odds = length // 2
    c = a
    is_even = a < evens
    is_odd = c < odds
    even_protected = (protected + 1) // 2
    odd_protected = protected // 2
    first_odd = protected + evens - even_protected - r  # new position of the first unprotected odd token
    kept = length - r

    even_stays = tl.where(2 * a < protected, 2 * a, protected + a - even_protected - merged_before)
    even_place = tl.where(merges, first_odd + partner - odd_protected, even_stays)
    even_slot = tl.where(merges, even_place + 1 + in_front, even_stays)
    tl.store(target_ptr + batch * length + 2 * a, even_place.to(tl.int64), mask=is_even)
    tl.store(member_ptr + batch * length + even_slot, 2 * a, mask=is_even)
    tl.store(start_ptr + batch * (kept + 1) + even_stays, even_stays, mask=is_even & ~merges)

    odd_free = 2 * c + 1 >= protected
    odd_place = tl.where(odd_free, first_odd + c - odd_protected, 2 * c + 1)
    odd_slot = tl.where(odd_free, odd_place + into_lower, 2 * c + 1)
    tl.store(target_ptr + batch * length + 2 * c + 1, odd_place.to(tl.int64), mask=is_odd)
    tl.store(member_ptr + batch * length + odd_slot, 2 * c + 1, mask=is_odd)
    tl.store(start_ptr + batch * (kept + 1) + odd_place, odd_slot, mask=is_odd)
    tl.store(start_ptr + batch * (kept + 1) + kept + 0 * a, length + 0 * a, mask=a == 0)


@triton.jit(do_not_specialize=["heads", "length", "protected", "r"])
def _match_whole(
    k_ptr, scratch_ptr, target_ptr, member_ptr, start_ptr, k_b, k_h, k_n, heads, length, protected, r,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run all four steps for an image of at most 2·BLOCK tokens in one program."""
    batch = tl.program_id(0).to(tl.int64)
    evens = (length + 1) // 2
    odds = length // 2
    a = tl.arange(0, BLOCK)
    channel = tl.arange(0, D_PAD)
    inside = (channel < D)[None, :]
    at = k_ptr + batch * k_b + (2 * a[:, None]) * k_n + channel[None, :]
    left = tl.zeros([BLOCK, D_PAD], tl.float32)
    right = tl.zeros([BLOCK, D_PAD], tl.float32)
    for head in range(heads):
        left += tl.load(at + head * k_h, mask=(a < evens)[:, None] & inside, other=0.0).to(tl.float32)
        right += tl.load(at + k_n + head * k_h, mask=(a < odds)[:, None] & inside, other=0.0).to(tl.float32)
    left = _unit(left / heads)
    right = _unit(right / heads)
    scores = tl.dot(left, right.T, input_precision="tf32x3")
    scores = tl.where(scores != scores, -3.4028234663852886e38, scores)
    open_pairs = ((2 * a >= protected) & (a < evens))[:, None] & ((2 * a + 1 >= protected) & (a < odds))[None, :]
    scores = tl.where(open_pairs, scores, float("-inf"))
    best, partner = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
    partner = partner.to(tl.int32)

    # vectors along the other axis come by way of memory
    scratch = scratch_ptr + batch * 2 * BLOCK
    tl.store(scratch + a, best)
    tl.store(scratch + BLOCK + a, partner.to(tl.float32))
    tl.debug_barrier()
    other = tl.load(scratch + a)
    there = tl.load(scratch + BLOCK + a).to(tl.int32)[None, :]
    merges = (tl.sum(_comes_before(other, a, best, a, evens), 1) < r) & (a < evens)
    tl.debug_barrier()
    tl.store(scratch + a, merges.to(tl.float32))
    tl.debug_barrier()
    merged = (tl.load(scratch + a) > 0)[None, :]
    before = merged & (a[None, :] < a[:, None])
    merged_before = tl.sum(before.to(tl.int32), 1)
    in_front = (merged & (there < partner[:, None])) | (before & (there == partner[:, None]))
    in_front = tl.sum(in_front.to(tl.int32), 1)
    into_lower = tl.sum((merged & (there < a[:, None])).to(tl.int32), 1)
    _write_places(
        target_ptr, member_ptr, start_ptr, batch, a, partner, merges, merged_before, in_front, into_lower,
        length, protected, r,
    )  # fmt: skip


@triton.jit
def _unit(x):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)[:, None]


def launch(k: Tensor, r: int, protected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Match tokens by their keys (B, H, N, D).

    Returns ``target`` (B, N), the group of each token; ``member`` (B, N), the tokens group by group, the one that stays
    first; ``start`` (B, N − r + 1), where the members of each group start.
    """
    batch, heads, length, channels = k.shape
    if k.stride(3) != 1:
        k = k.contiguous()
    device = k.device
    target = torch.empty(batch, length, dtype=torch.int64, device=device)
    member = torch.empty(batch, length, dtype=torch.int32, device=device)
    start = torch.empty(batch, length - r + 1, dtype=torch.int32, device=device)
    padded = max(16, launching.power_of_two(channels))
    evens = (length + 1) // 2
    block = max(16, launching.power_of_two(evens))
    strides = k.stride()[:3]
    width = {"D": channels, "D_PAD": padded}
    if evens <= WHOLE // 2 and padded * block <= 64 * 128:  # what a multiprocessor's memory holds
        scratch = torch.empty(batch, 2 * block, dtype=torch.float32, device=device)
        tensors, numbers = (k, scratch, target, member, start), (*strides, heads, length, protected, r)
        warps = 8 if block == 128 else 4
        launching.launch(_match_whole, (batch,), tensors, numbers, {**width, "BLOCK": block}, num_warps=warps)
        return target, member, start
    metric = torch.empty(batch, length, channels, dtype=torch.float32, device=device)
    best = torch.empty(batch, evens, dtype=torch.float32, device=device)
    partner = torch.empty(batch, evens, dtype=torch.int32, device=device)
    merges = torch.empty(batch, evens, dtype=torch.int32, device=device)
    across = (batch, launching.blocks(evens, 64))
    blocks = {"BLOCK_A": 64, "BLOCK_J": 64}
    grid = (batch, launching.blocks(length, 16))
    launching.launch(_metric, grid, (k, metric), (*strides, heads, length), {**width, "BLOCK": 16}, num_warps=4)
    launching.launch(
        _best, across, (metric, best, partner), (length, protected), {**width, "BLOCK_A": 64, "BLOCK_C": 64},
        num_warps=4, num_stages=2,
    )  # fmt: skip
    launching.launch(_choose, across, (best, merges), (evens, r), blocks, num_warps=4)
    places = (partner, merges, target, member, start)
    launching.launch(_place, across, places, (length, protected, r), blocks, num_warps=4)
    return target, member, start
