"""Proportional attention as one kernel: a bias per key instead of a mask, any strides, no copy of q, k or v.

B batch, H heads, N tokens, D channels of a head. ``bias`` is log₂ of each key's size; beyond the last key it is −∞,
which is all the masking that scores need. A key of size 0 has bias −∞ too: it is padding.

Up to 256 tokens, one program keeps all keys and values of a head and walks over the queries: one softmax, no running
maximum. Longer sequences walk over the keys, with a running maximum and sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching

LOG2E = 1.4426950408889634
WHOLE = 256
"""Longest sequence whose keys one program keeps."""


@triton.jit(do_not_specialize=["heads", "length"])
def _attend_whole(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, sum_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    keys = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D_PAD)
    mask = (keys < length)[:, None]
    if D != D_PAD:
        mask = mask & (channel < D)[None, :]
    k = tl.load(k_ptr + batch * k_b + head * k_h + keys[:, None] * k_n + channel[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + batch * v_b + head * v_h + keys[:, None] * v_n + channel[None, :], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
    for first in tl.range(0, length, BLOCK_M, num_stages=2):
        rows = first + tl.arange(0, BLOCK_M)
        row_mask = (rows < length)[:, None]
        if D != D_PAD:
            row_mask = row_mask & (channel < D)[None, :]
        q = tl.load(q_ptr + batch * q_b + head * q_h + rows[:, None] * q_n + channel[None, :], mask=row_mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="tf32x3") * scale + bias[None, :]
        peak = tl.max(scores, 1)
        weight = tl.exp2(scores - peak[:, None])
        total = tl.sum(weight, 1)
        out = tl.dot(weight.to(v.dtype), v, input_precision="tf32x3") / total[:, None]
        at = out_ptr + ((batch * length + rows[:, None]) * heads + head) * D + channel[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=row_mask)
        if KEEPS:
            tl.store(sum_ptr + (batch * heads + head) * length + rows, peak + tl.log2(total), mask=rows < length)


@triton.jit(do_not_specialize=["heads", "length"])
def _attend_steps(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, sum_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, D_PAD)
    row_mask = (rows < length)[:, None]
    if D != D_PAD:
        row_mask = row_mask & (channel < D)[None, :]
    q = tl.load(q_ptr + batch * q_b + head * q_h + rows[:, None] * q_n + channel[None, :], mask=row_mask, other=0.0)
    k_base = k_ptr + batch * k_b + head * k_h + channel[None, :]
    v_base = v_ptr + batch * v_b + head * v_h + channel[None, :]
    bias_base = bias_ptr + batch * length
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    whole = length // BLOCK_N * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        best, total, acc = _step(
            q, k_base, v_base, bias_base, best, total, acc, start, k_n, v_n, length, scale, D, D_PAD, BLOCK_N, False
        )
    if whole < length:  # the last keys alone need masks
        best, total, acc = _step(
            q, k_base, v_base, bias_base, best, total, acc, whole, k_n, v_n, length, scale, D, D_PAD, BLOCK_N, True
        )
    out = acc / total[:, None]
    at = out_ptr + ((batch * length + rows[:, None]) * heads + head) * D + channel[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    if KEEPS:
        tl.store(sum_ptr + (batch * heads + head) * length + rows, best + tl.log2(total), mask=rows < length)


@triton.jit
def _step(
    q, k_base, v_base, bias_base, best, total, acc, start, k_n, v_n, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Attend to one block of keys."""
    keys = start + tl.arange(0, BLOCK_N)
    if D != D_PAD:
        mask = (tl.arange(0, D_PAD) < D)[None, :] & (keys < length)[:, None]
        k = tl.load(k_base + keys[:, None] * k_n, mask=mask, other=0.0)
        v = tl.load(v_base + keys[:, None] * v_n, mask=mask, other=0.0)
        bias = tl.load(bias_base + keys, mask=keys < length, other=float("-inf"))
    elif LAST:
        k = tl.load(k_base + keys[:, None] * k_n, mask=(keys < length)[:, None], other=0.0)
        v = tl.load(v_base + keys[:, None] * v_n, mask=(keys < length)[:, None], other=0.0)
        bias = tl.load(bias_base + keys, mask=keys < length, other=float("-inf"))
    else:
        k = tl.load(k_base + keys[:, None] * k_n)
        v = tl.load(v_base + keys[:, None] * v_n)
        bias = tl.load(bias_base + keys)
    scores = tl.dot(q, k.T, input_precision="tf32x3") * scale + bias[None, :]
    peak = tl.maximum(best, tl.max(scores, 1))
    weight = tl.exp2(scores - peak[:, None])
    shrink = tl.exp2(best - peak)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return peak, total, acc


def launch(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of (B, H, N, D) tensors of any strides, with log₂ sizes (B, N) as bias.

    Returns (B, N, H·D) and, with ``keep``, log₂ of each query's sum of weights (B, H, N) for the gradient.
    """
    batch, heads, length, channels = q.shape
    q, k, v = readable(q), readable(k), readable(v)
    out = torch.empty(batch, length, heads * channels, dtype=q.dtype, device=q.device)
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device) if keep else None
    tensors = (q, k, v, bias, out, out if sums is None else sums)
    numbers = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads, length, scale * LOG2E)
    padded, wide = width(q)
    constants: dict[str, int] = {"D": channels, "D_PAD": padded, "KEEPS": keep}
    if q.dtype != torch.float32 and length <= (WHOLE // 2 if wide else WHOLE):
        constants |= {"BLOCK_M": 32 if wide else 64, "BLOCK_N": power(length)}
        launching.launch(_attend_whole, (batch * heads,), tensors, numbers, constants, num_warps=4)
    else:
        block_m, block_n, stages = _blocks(length, wide)
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}
        grid = (batch * heads, launching.blocks(length, block_m))
        launching.launch(_attend_steps, grid, tensors, numbers, constants, num_warps=4)
    return out, sums


def _blocks(length: int, wide: bool) -> tuple[int, int, int]:
    """Return queries and keys per block and pipeline stages, as measured fastest on a Hopper GPU."""
    if wide:
        return 64, 32, 2
    return (128, 64, 3) if length > 540 else (64, 32, 3)


def width(q: Tensor) -> tuple[int, bool]:
    """Return the padded head width, and whether it takes more than 64 channels of half precision."""
    padded = power(q.shape[3])
    return padded, padded > 64 or q.dtype == torch.float32


def power(length: int) -> int:
    """Return the next power of two that tensor cores accept."""
    return max(16, launching.power_of_two(length))


def readable(part: Tensor) -> Tensor:
    """Return the tensor with contiguous channels, as the kernels read them."""
    return part if part.stride(3) == 1 else part.contiguous()
