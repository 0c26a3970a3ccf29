"""Groups of tokens by counting: which edges merge, where tokens go, and the members of each group.

    _rank                values ─► ranks in descending order                                       (B, N)
    _settle              best edges ─► the token that leads each token's group                     (B, N)
    _place_groups        leaders ─► the new position of each token, and the members of each group  (B, N)
    _list                any index map ─► the members of each group                                (B, N)
    _first               any index map ─► the first member of each token's group                   (B, N)
    _strongest_between   places ─► the highest value of a map on the line between two              (B, A, C)
    _best_members        any index map ─► whether a token has the highest rating of its group      (B, N)

Everything is counted over all pairs of tokens, so there is no sort, no scatter and no atomic: the same input gives the
same bits. Members are listed in their order. Masks (1 or B, N) have one byte per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching
from vitrail.merging.bipartite import SAMPLES

BLOCK = 64


@triton.jit
def comes_before(other, j, mine, i, length):
    """Return whether value j precedes value i in descending order, ties by lower index: (I, J) of 0 and 1."""
    larger = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
    return (larger & (j < length)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["length"])
def _rank(value_ptr, rank_ptr, length, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = tl.load(value_ptr + batch * length + i, mask=i < length, other=float("-inf"))
    ahead = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for start in range(0, length, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(value_ptr + batch * length + j, mask=j < length, other=float("-inf"))
        ahead += comes_before(other, j, mine, i, length)
    tl.store(rank_ptr + batch * length + i, tl.sum(ahead, 1).to(tl.int64), mask=i < length)


@triton.jit
def _is_present(present_ptr, batch, token, length, HAS_PRESENT: tl.constexpr):
    there = (token >= 0) & (token < length)
    if HAS_PRESENT:
        there = there & (tl.load(present_ptr + batch * length + token, mask=there, other=0) != 0)
    return there


@triton.jit
def _is_protected(mask_ptr, batch, token, inside, length, protected, mask_b, HAS_MASK: tl.constexpr):
    held = token < protected
    if HAS_MASK:
        held = tl.load(mask_ptr + batch * mask_b + token, mask=inside, other=1) != 0
    return held


@triton.jit(do_not_specialize=["length", "protected", "mask_b", "r"])
def _settle(
    best_ptr, partner_ptr, amount_ptr, mask_ptr, present_ptr, group_ptr, kept_ptr, length, protected, mask_b, r,
    HAS_AMOUNT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PRESENT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Let the r best edges of each image merge, or as many as it may; count the tokens that stay."""
    batch = tl.program_id(0).to(tl.int64)
    evens = (length + 1) // 2
    a = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = tl.load(best_ptr + batch * evens + a, mask=a < evens, other=float("-inf"))
    partner = tl.load(partner_ptr + batch * evens + a, mask=a < evens, other=0)
    ahead = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    sources = tl.zeros([BLOCK_J], tl.int32)
    destinations = tl.zeros([BLOCK_J], tl.int32)
    here = tl.zeros([BLOCK_J], tl.int32)
    for start in range(0, evens, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(best_ptr + batch * evens + j, mask=j < evens, other=float("-inf"))
        ahead += comes_before(other, j, mine, a, evens)
        if HAS_AMOUNT:
            even = _is_present(present_ptr, batch, 2 * j, length, HAS_PRESENT)
            odd = _is_present(present_ptr, batch, 2 * j + 1, length, HAS_PRESENT)
            here += even.to(tl.int32) + odd.to(tl.int32)
            held = _is_protected(mask_ptr, batch, 2 * j, even, length, protected, mask_b, HAS_MASK)
            sources += (even & (held == 0)).to(tl.int32)
            held = _is_protected(mask_ptr, batch, 2 * j + 1, odd, length, protected, mask_b, HAS_MASK)
            destinations += (odd & (held == 0)).to(tl.int32)
    limit = r
    there = length
    if HAS_AMOUNT:
        free_evens = tl.sum(sources, 0)
        free_odds = tl.sum(destinations, 0)
        edges = tl.minimum(tl.where(free_odds > 0, free_evens, 0), (free_evens + free_odds) // 2)
        limit = tl.minimum(tl.load(amount_ptr + batch), edges).to(tl.int32)
        there = tl.sum(here, 0)
    tl.store(kept_ptr + batch + 0 * a, there - limit + 0 * a, mask=a == 0)
    merges = tl.sum(ahead, 1) < limit
    tl.store(group_ptr + batch * length + 2 * a, tl.where(merges, 2 * partner + 1, 2 * a), mask=a < evens)
    tl.store(group_ptr + batch * length + 2 * a + 1, 2 * a + 1, mask=2 * a + 1 < length)


@triton.jit
def _key(
    group_ptr, mask_ptr, present_ptr, batch, token, length, protected, mask_b,
    KINDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PRESENT: tl.constexpr,
):  # fmt: skip
    """Return a number for each token that orders groups as they are placed, and whether the token leads its group."""
    present = _is_present(present_ptr, batch, token, length, HAS_PRESENT)
    leader = tl.load(group_ptr + batch * length + token, mask=present, other=0)
    key = leader
    if KINDS:
        held = _is_protected(mask_ptr, batch, leader, present, length, protected, mask_b, HAS_MASK)
        key += tl.where(held, 0, 1 + leader % 2) * length
    return tl.where(present, key, 3 * length), present & (leader == token)


@triton.jit(do_not_specialize=["length", "kept", "protected", "mask_b"])
def _place_groups(
    group_ptr, mask_ptr, present_ptr, target_ptr, member_ptr, start_ptr, length, kept, protected, mask_b,
    KINDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PRESENT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Place groups by kind (protected, even, odd) and then by leader, or by leader alone; padding comes last."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine, leads = _key(
        group_ptr, mask_ptr, present_ptr, batch, i, length, protected, mask_b, KINDS, HAS_MASK, HAS_PRESENT
    )
    first = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)  # members of earlier groups
    earlier = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)  # earlier members of the same group
    place = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)  # earlier groups
    groups = tl.zeros([BLOCK_J], tl.int32)
    here = tl.zeros([BLOCK_J], tl.int32)
    for begin in range(0, length, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        other, other_leads = _key(
            group_ptr, mask_ptr, present_ptr, batch, j, length, protected, mask_b, KINDS, HAS_MASK, HAS_PRESENT
        )
        inside = (j < length)[None, :]
        less = (other[None, :] < mine[:, None]) & inside
        first += less.to(tl.int32)
        earlier += ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]) & inside).to(tl.int32)
        place += (less & other_leads[None, :]).to(tl.int32)
        groups += other_leads.to(tl.int32)
        here += (other < 3 * length).to(tl.int32)
    first = tl.sum(first, 1)
    place = tl.sum(place, 1)
    count = tl.sum(groups, 0)
    present = tl.sum(here, 0)
    target = tl.where(mine < 3 * length, place, tl.minimum(count, kept - 1))
    tl.store(target_ptr + batch * length + i, target.to(tl.int64), mask=i < length)
    tl.store(member_ptr + batch * length + first + tl.sum(earlier, 1), i, mask=i < length)
    start = start_ptr + batch * (kept + 1)
    tl.store(start + place, first, mask=leads)
    # groups without a leader: the first of them has the padding, unless there is none
    tl.store(start + i, tl.where((i == count) & (count < kept), present, length), mask=(i >= count) & (i <= kept))


@triton.jit(do_not_specialize=["length", "kept"])
def _list(
    target_ptr, member_ptr, start_ptr, length, kept, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = tl.load(target_ptr + batch * length + i, mask=i < length, other=0).to(tl.int32)
    slot = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    first = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for begin in range(0, length, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        inside = (j < length)[None, :]
        other = tl.load(target_ptr + batch * length + j, mask=j < length, other=0).to(tl.int32)[None, :]
        before = (other < mine[:, None]) | ((other == mine[:, None]) & (j[None, :] < i[:, None]))
        slot += (before & inside).to(tl.int32)
        first += ((other < i[:, None]) & inside).to(tl.int32)
    tl.store(member_ptr + batch * length + tl.sum(slot, 1), i, mask=i < length)
    tl.store(start_ptr + batch * (kept + 1) + i, tl.sum(first, 1), mask=i <= kept)


@triton.jit(do_not_specialize=["length"])
def _first(target_ptr, first_ptr, length, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = tl.load(target_ptr + batch * length + i, mask=i < length, other=-1).to(tl.int32)
    found = i
    for begin in range(0, length, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        other = tl.load(target_ptr + batch * length + j, mask=j < length, other=-2).to(tl.int32)
        same = other[None, :] == mine[:, None]
        found = tl.minimum(found, tl.min(tl.where(same, j[None, :], length), 1))
    tl.store(first_ptr + batch * length + i, found, mask=i < length)


@triton.jit(do_not_specialize=["length"])
def _best_members(target_ptr, rating_ptr, found_ptr, length, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = tl.load(rating_ptr + batch * length + i, mask=i < length, other=0.0)
    group = tl.load(target_ptr + batch * length + i, mask=i < length, other=-1)
    better = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for start in range(0, length, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(rating_ptr + batch * length + j, mask=j < length, other=0.0)
        there = tl.load(target_ptr + batch * length + j, mask=j < length, other=-2)
        better += tl.where(there[None, :] == group[:, None], comes_before(other, j, mine, i, length), 0)
    tl.store(found_ptr + batch * length + i, (tl.sum(better, 1) == 0).to(tl.uint8), mask=i < length)


@triton.jit(do_not_specialize=["evens", "odds", "height", "wide"])
def _strongest_between(
    map_ptr, source_ptr, destination_ptr, out_ptr, source_b, source_n, destination_b, destination_n,
    evens, odds, height, wide,
    SAMPLES: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Read the highest value of a map on the line between two places, for all pairs of them."""
    batch = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = source_ptr + batch * source_b + a * source_n
    row_a = tl.load(at, mask=a < evens, other=0.0)
    column_a = tl.load(at + 1, mask=a < evens, other=0.0)
    at = destination_ptr + batch * destination_b + c * destination_n
    row_c = tl.load(at, mask=c < odds, other=0.0)
    column_c = tl.load(at + 1, mask=c < odds, other=0.0)
    found = tl.full([BLOCK_A, BLOCK_C], float("-inf"), tl.float32)
    for sample in range(SAMPLES):
        share = sample / (SAMPLES - 1)
        row = tl.floor(row_a[:, None] * (1 - share) + row_c[None, :] * share + 0.5)
        column = tl.floor(column_a[:, None] * (1 - share) + column_c[None, :] * share + 0.5)
        row = tl.minimum(tl.maximum(row.to(tl.int32), 0), height - 1)
        column = tl.minimum(tl.maximum(column.to(tl.int32), 0), wide - 1)
        found = tl.maximum(found, tl.load(map_ptr + batch * height * wide + row * wide + column))
    inside = (a < evens)[:, None] & (c < odds)[None, :]
    tl.store(out_ptr + (batch * evens + a[:, None]) * odds + c[None, :], found, mask=inside)


def launch_strongest_between(values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return the highest value of a map (B, h, w) on the lines from places (B, A, 2) to places (B, C, 2): (B, A, C).

    All are float32; lines are read at the nearest cells of ``SAMPLES`` points.
    """
    values = values.contiguous()
    sources, destinations = (part if part.stride(2) == 1 else part.contiguous() for part in (sources, destinations))
    batch, evens, odds = values.shape[0], sources.shape[1], destinations.shape[1]
    found = torch.empty(batch, evens, odds, dtype=torch.float32, device=values.device)
    if not found.numel():
        return found
    numbers = (*sources.stride()[:2], *destinations.stride()[:2], evens, odds, values.shape[1], values.shape[2])
    grid = (batch, launching.blocks(evens, 32), launching.blocks(odds, 64))
    constants = {"SAMPLES": SAMPLES, "BLOCK_A": 32, "BLOCK_C": 64}
    launching.launch(_strongest_between, grid, (values, sources, destinations, found), numbers, constants, num_warps=4)
    return found


def launch_rank(values: Tensor) -> Tensor:
    """Return the rank (B, N) of float32 values, 0 for the largest; ties go to the lower index."""
    values = values.contiguous()
    batch, length = values.shape
    found = torch.empty(batch, length, dtype=torch.int64, device=values.device)
    launching.launch(_rank, _across(batch, length), (values, found), (length,), _BLOCKS, num_warps=4)
    return found


def launch_settle(
    best: Tensor,
    partner: Tensor,
    r: int,
    amount: Tensor | None,
    length: int,
    protected: int,
    mask: Tensor | None,
    present: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Merge the best edges (B, A); return the leader of each token's group (B, N) and the tokens left (B,).

    Args:
        best: score of each even token with the odd token ``partner``.
        r: number of merges, where ``amount`` is None.
        amount: number of merges of each image (B,), int64; no more merge than the tokens allow.
        protected: tokens in front that are protected, where ``mask`` is None.
        mask: protected tokens (1 or B, N).
        present: 0 for padding (B, N).
    """
    batch = best.shape[0]
    group = torch.empty(batch, length, dtype=torch.int32, device=best.device)
    kept = torch.empty(batch, dtype=torch.int32, device=best.device)
    amounts = best if amount is None else amount.contiguous()
    masks, flags, stride = as_bytes(mask, present, best)
    launching.launch(
        _settle, _across(batch, (length + 1) // 2), (best, partner, amounts, *masks, group, kept),
        (length, protected, stride, r), {"HAS_AMOUNT": amount is not None, **flags, **_BLOCKS}, num_warps=4,
    )  # fmt: skip
    return group, kept


def launch_place(
    group: Tensor, kept: int, kinds: bool, protected: int = 0, mask: Tensor | None = None, present: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Place the groups of leaders (B, N), int32; return target (B, N), member (B, N) and start (B, kept + 1).

    Args:
        kept: number of groups after; images with fewer have empty ones behind.
        kinds: protected groups first, then those whose leader is even, then odd; otherwise by leader alone.
    """
    group = group.contiguous()
    batch, length = group.shape
    target = torch.empty(batch, length, dtype=torch.int64, device=group.device)
    member, start = _lists(batch, length, kept, group.device)
    masks, flags, stride = as_bytes(mask, present, group)
    launching.launch(
        _place_groups, _across(batch, length + 1), (group, *masks, target, member, start),
        (length, kept, protected, stride), {"KINDS": kinds, **flags, **_BLOCKS}, num_warps=4,
    )  # fmt: skip
    return target, member, start


def launch_list(target: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """List the members of each group of an index map (B, N): member (B, N) and start (B, kept + 1)."""
    target = target.contiguous()
    batch, length = target.shape
    member, start = _lists(batch, length, kept, target.device)
    grid = _across(batch, max(length, kept + 1))
    launching.launch(_list, grid, (target, member, start), (length, kept), _BLOCKS, num_warps=4)
    return member, start


def launch_first(target: Tensor) -> Tensor:
    """Return the first member (B, N), int32, of each token's group in an index map (B, N)."""
    target = target.contiguous()
    batch, length = target.shape
    first = torch.empty(batch, length, dtype=torch.int32, device=target.device)
    launching.launch(_first, _across(batch, length), (target, first), (length,), _BLOCKS, num_warps=4)
    return first


def launch_best_members(target: Tensor, rating: Tensor) -> Tensor:
    """Return 1 (uint8) for the member (B, N) of each group with the highest rating; ties go to the lower index."""
    target, rating = target.contiguous(), rating.contiguous()
    batch, length = target.shape
    found = torch.empty(batch, length, dtype=torch.uint8, device=target.device)
    launching.launch(_best_members, _across(batch, length), (target, rating, found), (length,), _BLOCKS, num_warps=4)
    return found


_BLOCKS = {"BLOCK_I": BLOCK, "BLOCK_J": BLOCK}


def _across(batch: int, length: int) -> tuple[int, int]:
    return batch, launching.blocks(length, BLOCK)


def _lists(batch: int, length: int, kept: int, device: torch.device) -> tuple[Tensor, Tensor]:
    member = torch.empty(batch, length, dtype=torch.int32, device=device)
    return member, torch.empty(batch, kept + 1, dtype=torch.int32, device=device)


def as_bytes(
    mask: Tensor | None, present: Tensor | None, instead: Tensor
) -> tuple[tuple[Tensor, Tensor], dict[str, bool], int]:
    """Return both masks as bytes, which of them there are, and the stride between images of the first."""
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    present = None if present is None else present.contiguous().view(torch.uint8)
    stride = 0 if mask is None or len(mask) == 1 else mask.shape[1]
    flags = {"HAS_MASK": mask is not None, "HAS_PRESENT": present is not None}
    return (instead if mask is None else mask, instead if present is None else present), flags, stride
