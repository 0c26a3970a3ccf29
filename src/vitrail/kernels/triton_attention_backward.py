"""Gradients of proportional attention. Weights are recomputed from log₂ of their sums, which the forward keeps.

B batch, H heads, N tokens, D channels of a head. No atomics in either variant: the same input gives the same bits.

Short sequences: one program per head. It loops over blocks of keys and, for each, over the queries; gradients of
queries accumulate in memory that no other program touches.

Long sequences: one program per block of queries loops over the keys, then in a second launch one program per block of
keys loops over the queries. Scores are computed twice, but every multiprocessor has work, and nothing accumulates in
memory. Rows beyond the last repeat the last one; their weights are zero.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching
from vitrail.kernels.triton_attention import LOG2E, power, readable, width


class Blocks(NamedTuple):
    """Queries and keys per block, pipeline stages, warps, and the register limit per thread."""

    queries: int
    keys: int
    stages: int
    warps: int = 4
    registers: int = 255


@triton.jit(do_not_specialize=["heads", "length"])
def _back_head(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, sum_ptr, grad_ptr, dq_ptr, dk_ptr, dv_ptr, part_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    heads, length, scale, factor,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head, with transposed scores (keys by queries) for the products of keys."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    channel = tl.arange(0, D_PAD)
    q_base = q_ptr + batch * q_b + head * q_h + channel[None, :]
    dq_base = dq_ptr + batch * dq_b + head * dq_h + channel[None, :]
    out_base = (batch * length * heads + head) * D + channel[None, :]
    row_base = (batch * heads + head) * length
    for first_key in range(0, length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        mask = (keys < length)[:, None]
        if D != D_PAD:
            mask = mask & (channel < D)[None, :]
        k = tl.load(k_ptr + batch * k_b + head * k_h + keys[:, None] * k_n + channel[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + batch * v_b + head * v_h + keys[:, None] * v_n + channel[None, :], mask=mask, other=0.0)
        bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
        dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        dv = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        for first in tl.range(0, length, BLOCK_M, num_stages=2):
            rows = first + tl.arange(0, BLOCK_M)
            row_mask = (rows < length)[:, None]
            if D != D_PAD:
                row_mask = row_mask & (channel < D)[None, :]
            q = tl.load(q_base + rows[:, None] * q_n, mask=row_mask, other=0.0)
            at = out_base + rows[:, None] * heads * D
            grad = tl.load(grad_ptr + at, mask=row_mask, other=0.0)
            total = tl.load(sum_ptr + row_base + rows, mask=rows < length, other=float("inf"))
            scores = tl.dot(k, q.T, input_precision="tf32x3") * scale + bias[:, None]
            weight = tl.exp2(scores - total[None, :])
            dv = tl.dot(weight.to(q.dtype), grad, dv, input_precision="tf32x3")
            pull = tl.dot(v, grad.T, input_precision="tf32x3")
            if ONE:
                mean = tl.sum(weight * pull, 0)
            else:
                out = tl.load(out_ptr + at, mask=row_mask, other=0.0)
                mean = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
            pull = (weight * (pull - mean[None, :])).to(q.dtype)
            dk = tl.dot(pull, q, dk, input_precision="tf32x3")
            dq = tl.dot(pull.T, k, input_precision="tf32x3")
            dq_at = dq_base + rows[:, None] * dq_n
            if ONE:
                tl.store(dq_at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=row_mask)
            else:
                part_at = part_ptr + (row_base + rows[:, None]) * D + channel[None, :]
                if first_key > 0:
                    dq += tl.load(part_at, mask=row_mask, other=0.0)
                if first_key + BLOCK_N < length:
                    tl.store(part_at, dq, mask=row_mask)
                else:
                    tl.store(dq_at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=row_mask)
        if not ONE:
            tl.debug_barrier()
        dk_at = dk_ptr + batch * dk_b + head * dk_h + keys[:, None] * dk_n + channel[None, :]
        dv_at = dv_ptr + batch * dv_b + head * dv_h + keys[:, None] * dv_n + channel[None, :]
        tl.store(dk_at, (dk * factor).to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "length"])
def _back_queries(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, sum_ptr, grad_ptr, mean_ptr, dq_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dq_b, dq_h, dq_n,
    heads, length, scale, factor,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries; keep each query's weighted mean for the second launch."""
    batch, head, first_row = _place(heads, length, BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = tl.minimum(rows, length - 1)
    q = _rows(q_ptr + batch * q_b + head * q_h, inside, q_n, D, D_PAD)
    out_base = (batch * length * heads + head) * D
    grad = _rows(grad_ptr + out_base, inside, heads * D, D, D_PAD)
    out = _rows(out_ptr + out_base, inside, heads * D, D, D_PAD)
    mean = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    row_base = (batch * heads + head) * length
    tl.store(mean_ptr + row_base + rows, mean, mask=rows < length)
    total = tl.load(sum_ptr + row_base + inside)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for first in tl.range(0, length, BLOCK_N, num_stages=STAGES):
        keys = first + tl.arange(0, BLOCK_N)
        there = tl.minimum(keys, length - 1)
        k = _rows(k_ptr + batch * k_b + head * k_h, there, k_n, D, D_PAD)
        v = _rows(v_ptr + batch * v_b + head * v_h, there, v_n, D, D_PAD)
        bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
        scores = tl.dot(q, k.T, input_precision="tf32x3") * scale + (bias[None, :] - total[:, None])
        pull = tl.dot(grad, v.T, input_precision="tf32x3")
        pull = tl.exp2(scores) * (pull - mean[:, None])
        dq = tl.dot(pull.to(k.dtype), k, dq, input_precision="tf32x3")
    _write(dq_ptr + batch * dq_b + head * dq_h, rows, dq_n, length, dq * factor, D, D_PAD)


@triton.jit(do_not_specialize=["heads", "length"])
def _back_keys(
    q_ptr, k_ptr, v_ptr, bias_ptr, sum_ptr, grad_ptr, mean_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    heads, length, scale, factor,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, with scores transposed as in ``_back_head``."""
    batch, head, first_key = _place(heads, length, BLOCK_N)
    keys = first_key + tl.arange(0, BLOCK_N)
    there = tl.minimum(keys, length - 1)
    k = _rows(k_ptr + batch * k_b + head * k_h, there, k_n, D, D_PAD)
    v = _rows(v_ptr + batch * v_b + head * v_h, there, v_n, D, D_PAD)
    bias = tl.load(bias_ptr + batch * length + there)
    row_base = (batch * heads + head) * length
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    for first in tl.range(0, length, BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        inside = tl.minimum(rows, length - 1)
        q = _rows(q_ptr + batch * q_b + head * q_h, inside, q_n, D, D_PAD)
        grad = _rows(grad_ptr + (batch * length * heads + head) * D, inside, heads * D, D, D_PAD)
        total = tl.load(sum_ptr + row_base + rows, mask=rows < length, other=float("inf"))
        mean = tl.load(mean_ptr + row_base + inside)
        scores = tl.dot(k, q.T, input_precision="tf32x3") * scale + (bias[:, None] - total[None, :])
        weight = tl.exp2(scores)
        dv = tl.dot(weight.to(q.dtype), grad, dv, input_precision="tf32x3")
        pull = tl.dot(v, grad.T, input_precision="tf32x3")
        pull = weight * (pull - mean[None, :])
        dk = tl.dot(pull.to(q.dtype), q, dk, input_precision="tf32x3")
    _write(dk_ptr + batch * dk_b + head * dk_h, keys, dk_n, length, dk * factor, D, D_PAD)
    _write(dv_ptr + batch * dv_b + head * dv_h, keys, dv_n, length, dv, D, D_PAD)


@triton.jit
def _place(heads, length, BLOCK: tl.constexpr):
    """Return the image, the head and the first row of this program; the blocks of a head are adjacent programs."""
    parts = tl.cdiv(length, BLOCK)
    which = tl.program_id(0) // parts
    return (which // heads).to(tl.int64), (which % heads).to(tl.int64), tl.program_id(0) % parts * BLOCK


@triton.jit
def _rows(base, rows, step, D: tl.constexpr, D_PAD: tl.constexpr):
    channel = tl.arange(0, D_PAD)
    at = base + rows[:, None] * step + channel[None, :]
    if D == D_PAD:
        return tl.load(at)
    else:
        return tl.load(at, mask=(channel < D)[None, :], other=0.0)


@triton.jit
def _write(base, rows, step, length, values, D: tl.constexpr, D_PAD: tl.constexpr):
    channel = tl.arange(0, D_PAD)
    mask = (rows < length)[:, None] & (channel < D)[None, :]
    tl.store(base + rows[:, None] * step + channel[None, :], values.to(base.dtype.element_ty), mask=mask)


def launch(
    grad: Tensor, parts: tuple[Tensor, Tensor, Tensor], bias: Tensor, out: Tensor, sums: Tensor, scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write the gradients of q, k and v (B, H, N, D), given that of the output (B, N, H·D)."""
    q, k, v = (readable(part) for part in parts)
    grad = grad.contiguous()
    batch, heads, length, channels = q.shape
    padded, wide = width(q)
    numbers = (heads, length, scale * LOG2E, scale)
    constants = {"D": channels, "D_PAD": padded}
    if _splits(length, padded, q.dtype):
        means = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        for_queries, for_keys = _blocks_split(length, padded, q.dtype)
        launching.launch(
            _back_queries,
            (batch * heads * launching.blocks(length, for_queries.queries),),
            (q, k, v, bias, out, sums, grad, means, into[0]),
            (*_steps(q, k, v, into[0]), *numbers),
            constants | _constants(for_queries),
            num_warps=for_queries.warps,
            maxnreg=for_queries.registers,
        )
        launching.launch(
            _back_keys,
            (batch * heads * launching.blocks(length, for_keys.keys),),
            (q, k, v, bias, sums, grad, means, *into[1:]),
            (*_steps(q, k, v, *into[1:]), *numbers),
            constants | _constants(for_keys),
            num_warps=for_keys.warps,
            maxnreg=for_keys.registers,
        )
        return
    block_m, block_n = _blocks_head(length, wide)
    one = length <= block_n
    part = out if one else torch.empty(batch, heads, length, channels, dtype=torch.float32, device=q.device)
    launching.launch(
        _back_head,
        (batch * heads,),
        (q, k, v, bias, out, sums, grad, *into, part),
        (*_steps(q, k, v, *into), *numbers),
        constants | {"BLOCK_M": block_m, "BLOCK_N": block_n, "ONE": one},
        num_warps=4,
    )


def _blocks_head(length: int, wide: bool) -> tuple[int, int]:
    """Return queries and keys per block, as measured fastest on a Hopper GPU."""
    most = power(length)
    if wide:
        return min(32, most), min(32, most)
    return (32, 128) if most > 64 else (most, most)


def _splits(length: int, padded: int, dtype: torch.dtype) -> bool:
    """Return whether two launches beat one program per head, as measured on a Hopper GPU."""
    if dtype == torch.float32:
        return length > 192
    return length > (128 if padded <= 64 else 32)


def _blocks_split(length: int, padded: int, dtype: torch.dtype) -> tuple[Blocks, Blocks]:
    """Return the blocks for queries and for keys and values, as measured fastest on a Hopper GPU."""
    if dtype == torch.float32:
        small = Blocks(32, 32, 2)
        return (small, small) if padded > 64 else (Blocks(128, 64, 2, warps=8), Blocks(64, 128, 2, warps=8))
    if padded > 64:
        return Blocks(64, 32, 2), Blocks(64, 64, 2)
    for_queries = Blocks(128, 64, 3) if length > 1000 else Blocks(64, 64, 2)
    # with fewer registers, three programs share a multiprocessor instead of two
    return for_queries, Blocks(32, 128, 3) if length > 500 else Blocks(64, 64, 2, registers=168)


def _constants(blocks: Blocks) -> dict[str, int]:
    return {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "STAGES": blocks.stages}


def _steps(*tensors: Tensor) -> list[int]:
    return [step for tensor in tensors for step in tensor.stride()[:3]]
