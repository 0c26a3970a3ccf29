"""Matching without a sort: similarity, best partner, and places found by counting.

Everything a step needs is counted from three short vectors per image (best score, partner, merged or not), so
there is no sort, no scatter and no atomic: the same input gives the same bits.

    _metric    keys ─► mean over heads, unit norm                      (B, N, D)
    _best      each even token's most similar odd token                (B, A)
    _choose    the r best edges: rank = edges that come before         (B, A)
    _place     where each token goes, and the members of each group    (B, N)

Features wider than a program holds are compared in chunks of channels (_best_wide), also less a penalty of each token
and under masks, in place of the first two; scores that are given need their best alone (_best_given). _pairs compares
all tokens with all.

A = ⌈N/2⌉ tokens are at even positions, C = ⌊N/2⌋ at odd ones; the first P tokens are protected. The result has the P
protected tokens first, then the A − ⌈P/2⌉ − r even ones that stay, then the C − ⌊P/2⌋ odd ones, each in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching
from vitrail.kernels.triton_groups import as_bytes, comes_before

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
        ahead += comes_before(other, j, mine, a, evens)
    rank = tl.sum(ahead, 1)
    tl.store(merges_ptr + batch * evens + a, (rank < r).to(tl.int32), mask=a < evens)


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
    merges = (tl.sum(comes_before(other, a, best, a, evens), 1) < r) & (a < evens)
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


@triton.jit
def _chunk(ptr, token, token_stride, head_stride, channel, heads, mask, ONE: tl.constexpr):
    """Load some channels of tokens, mean over heads; of one head in their own dtype."""
    at = ptr + token * token_stride + channel
    found = tl.load(at, mask=mask, other=0.0)
    if not ONE:
        total = found.to(tl.float32)
        for head in range(1, heads):
            total += tl.load(at + head * head_stride, mask=mask, other=0.0).to(tl.float32)
        found = total / heads
    return found


@triton.jit
def _inverse_norm(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def _is_open(mask_ptr, present_ptr, batch, token, length, protected, mask_b, HAS_MASK, HAS_PRESENT):
    """Return whether tokens may merge: neither protected nor padding."""
    free = token < length
    if HAS_MASK:
        free = free & (tl.load(mask_ptr + batch * mask_b + token, mask=free, other=1) == 0)
    else:
        free = free & (token >= protected)
    if HAS_PRESENT:
        free = free & (tl.load(present_ptr + batch * length + token, mask=free, other=0) != 0)
    return free


@triton.jit(do_not_specialize=["heads", "length", "protected", "mask_b"])
def _best_wide(
    x_ptr, penalty_ptr, mask_ptr, present_ptr, best_ptr, partner_ptr,
    x_b, x_h, x_n, heads, length, protected, mask_b,
    D: tl.constexpr, CHUNK: tl.constexpr, ONE: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_PRESENT: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Find each even token's best odd one by the cosine of features of any width, less the penalties of both."""
    batch = tl.program_id(0).to(tl.int64)
    evens = (length + 1) // 2
    odds = length // 2
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    base = x_ptr + batch * x_b
    open_a = _is_open(mask_ptr, present_ptr, batch, 2 * a, length, protected, mask_b, HAS_MASK, HAS_PRESENT)
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    partner = tl.zeros([BLOCK_A], tl.int32)
    for start in range(0, odds, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        scores = tl.zeros([BLOCK_A, BLOCK_C], tl.float32)
        left_squares = tl.zeros([BLOCK_A], tl.float32)
        right_squares = tl.zeros([BLOCK_C], tl.float32)
        for first in range(0, D, CHUNK):
            channel = first + tl.arange(0, CHUNK)
            inside = channel < D
            left = _chunk(
                base, 2 * a[:, None], x_n, x_h, channel[None, :], heads, (a < evens)[:, None] & inside[None, :], ONE
            )
            right = _chunk(
                base, 2 * c[None, :] + 1, x_n, x_h, channel[:, None], heads, (c < odds)[None, :] & inside[:, None], ONE
            )
            scores = tl.dot(left, right, scores, input_precision="tf32x3")
            left_squares += tl.sum(left.to(tl.float32) * left.to(tl.float32), 1)
            right_squares += tl.sum(right.to(tl.float32) * right.to(tl.float32), 0)
        scores = scores * _inverse_norm(left_squares)[:, None] * _inverse_norm(right_squares)[None, :]
        scores = tl.where(scores != scores, -3.4028234663852886e38, scores)
        if HAS_PENALTY:
            scores -= tl.load(penalty_ptr + batch * length + 2 * a, mask=a < evens, other=0.0)[:, None]
            scores -= tl.load(penalty_ptr + batch * length + 2 * c + 1, mask=c < odds, other=0.0)[None, :]
        open_c = _is_open(mask_ptr, present_ptr, batch, 2 * c + 1, length, protected, mask_b, HAS_MASK, HAS_PRESENT)
        scores = tl.where(open_a[:, None] & open_c[None, :], scores, float("-inf"))
        peak, where = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
        better = peak > best
        partner = tl.where(better, start + where.to(tl.int32), partner)
        best = tl.where(better, peak, best)
    tl.store(best_ptr + batch * evens + a, best, mask=a < evens)
    tl.store(partner_ptr + batch * evens + a, partner, mask=a < evens)


@triton.jit(do_not_specialize=["evens", "odds"])
def _best_given(
    score_ptr, best_ptr, partner_ptr, evens, odds, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Find each even token's best odd one by scores that are given (B, A, C)."""
    batch = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    row = score_ptr + (batch * evens + a[:, None]) * odds
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    partner = tl.zeros([BLOCK_A], tl.int32)
    for start in range(0, odds, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        scores = tl.load(row + c[None, :], mask=(a < evens)[:, None] & (c < odds)[None, :], other=float("-inf"))
        peak, where = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
        better = peak > best
        partner = tl.where(better, start + where.to(tl.int32), partner)
        best = tl.where(better, peak, best)
    tl.store(best_ptr + batch * evens + a, best, mask=a < evens)
    tl.store(partner_ptr + batch * evens + a, partner, mask=a < evens)


@triton.jit(do_not_specialize=["length"])
def _pairs(
    x_ptr, among_ptr, found_ptr, x_b, x_n, length, margin,
    D: tl.constexpr, CHUNK: tl.constexpr, SUMS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum ELU(cos − margin) of each token with some others, or find the most similar of these."""
    batch = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    base = x_ptr + batch * x_b
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    partner = tl.zeros([BLOCK_A], tl.int32)
    total = tl.zeros([BLOCK_A], tl.float32)
    for start in range(0, length, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        scores = tl.zeros([BLOCK_A, BLOCK_C], tl.float32)
        left_squares = tl.zeros([BLOCK_A], tl.float32)
        right_squares = tl.zeros([BLOCK_C], tl.float32)
        for first in range(0, D, CHUNK):
            channel = first + tl.arange(0, CHUNK)
            inside = channel < D
            left = tl.load(
                base + a[:, None] * x_n + channel[None, :], mask=(a < length)[:, None] & inside[None, :], other=0.0
            )
            right = tl.load(
                base + c[None, :] * x_n + channel[:, None], mask=(c < length)[None, :] & inside[:, None], other=0.0
            )
            scores = tl.dot(left, right, scores, input_precision="tf32x3")
            left_squares += tl.sum(left.to(tl.float32) * left.to(tl.float32), 1)
            right_squares += tl.sum(right.to(tl.float32) * right.to(tl.float32), 0)
        scores = scores * _inverse_norm(left_squares)[:, None] * _inverse_norm(right_squares)[None, :]
        scores = tl.where(scores != scores, -3.4028234663852886e38, scores)
        among = tl.load(among_ptr + batch * length + c, mask=c < length, other=0) != 0
        if SUMS:
            scores -= margin
            scores = tl.where(scores > 0, scores, tl.exp(tl.minimum(scores, 0.0)) - 1)
            total += tl.sum(tl.where(among[None, :], scores, 0.0), 1)
        else:
            scores = tl.where(among[None, :], scores, float("-inf"))
            peak, where = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
            better = peak > best
            partner = tl.where(better, start + where.to(tl.int32), partner)
            best = tl.where(better, peak, best)
    if SUMS:
        tl.store(found_ptr + batch * length + a, total, mask=a < length)
    else:
        tl.store(found_ptr + batch * length + a, partner.to(tl.int64), mask=a < length)


def launch_pairs(x: Tensor, among: Tensor, margin: float | None) -> Tensor:
    """Compare all pairs of tokens by the cosine of features (B, N, D); return one value for each token (B, N).

    Args:
        among: the tokens (B, N) to compare with, boolean.
        margin: sum ELU(cos − margin), in float32; None: the position of the most similar one, in int64.
    """
    if x.stride(2) != 1:
        x = x.contiguous()
    batch, length, channels = x.shape
    among = among.contiguous().view(torch.uint8)
    found = torch.empty(batch, length, dtype=torch.int64 if margin is None else torch.float32, device=x.device)
    block = min(64, max(16, launching.power_of_two(length)))
    constants = {
        "D": channels, "CHUNK": 64 if x.dtype != torch.float32 else 32, "SUMS": margin is not None,
        "BLOCK_A": block, "BLOCK_C": block,
    }  # fmt: skip
    launching.launch(
        _pairs, (batch, launching.blocks(length, block)), (x, among, found),
        (*x.stride()[:2], length, float(margin or 0.0)), constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return found


NARROW = 128
"""Most channels that a program compares at once."""


def launch_best(
    x: Tensor, protected: int, penalty: Tensor | None = None, mask: Tensor | None = None, present: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find each even token's most similar odd one by features (B, H, N, D): best (B, A) and partner (B, A).

    Args:
        protected: tokens in front that cannot merge, where ``mask`` is None.
        penalty: subtracted from the cosines of each token (B, N), float32.
        mask: protected tokens (1 or B, N), boolean.
        present: False for padding (B, N).
    """
    batch, heads, length, channels = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    best, partner = _edges(batch, (length + 1) // 2, x.device)
    block = min(64, max(16, launching.power_of_two((length + 1) // 2)))
    masks, flags, stride = as_bytes(mask, present, x)
    tensors = (x, x if penalty is None else penalty.contiguous(), *masks, best, partner)
    constants = {
        "D": channels, "CHUNK": 64 if x.dtype != torch.float32 else 32, "ONE": heads == 1,
        "HAS_PENALTY": penalty is not None, **flags, "BLOCK_A": block, "BLOCK_C": block,
    }  # fmt: skip
    launching.launch(
        _best_wide, (batch, launching.blocks((length + 1) // 2, block)), tensors,
        (*x.stride()[:3], heads, length, protected, stride), constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return best, partner


def launch_best_given(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Find each even token's best odd one by float32 scores (B, A, C): best (B, A) and partner (B, A)."""
    scores = scores.contiguous()
    batch, evens, odds = scores.shape
    best, partner = _edges(batch, evens, scores.device)
    launching.launch(
        _best_given, (batch, launching.blocks(evens, 32)), (scores, best, partner), (evens, odds),
        {"BLOCK_A": 32, "BLOCK_C": 128}, num_warps=4,
    )  # fmt: skip
    return best, partner


def _edges(batch: int, evens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    best = torch.empty(batch, evens, dtype=torch.float32, device=device)
    return best, torch.empty(batch, evens, dtype=torch.int32, device=device)


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
    if (
        channels <= NARROW and evens <= WHOLE // 2 and padded * block <= 64 * 128
    ):  # what a multiprocessor's memory holds
        scratch = torch.empty(batch, 2 * block, dtype=torch.float32, device=device)
        tensors, numbers = (k, scratch, target, member, start), (*strides, heads, length, protected, r)
        warps = 8 if block == 128 else 4
        launching.launch(_match_whole, (batch,), tensors, numbers, {**width, "BLOCK": block}, num_warps=warps)
        return target, member, start
    merges = torch.empty(batch, evens, dtype=torch.int32, device=device)
    across = (batch, launching.blocks(evens, 64))
    blocks = {"BLOCK_A": 64, "BLOCK_J": 64}
    if channels > NARROW:
        best, partner = launch_best(k, protected)
    else:
        metric = torch.empty(batch, length, channels, dtype=torch.float32, device=device)
        best, partner = _edges(batch, evens, device)
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
