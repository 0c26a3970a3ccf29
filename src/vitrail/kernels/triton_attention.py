"""Proportional attention as one kernel: a bias per key instead of a mask, any strides, no copy of q, k or v.

B batch, H heads, N tokens, D channels of a head. ``bias`` is log₂ of each key's size; beyond the last key it is −∞,
which is all the masking that scores need.

Up to 256 tokens, one program keeps all keys and values of a head and walks over the queries: one softmax, no running
maximum. Longer sequences walk over the keys, with a running maximum and sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
WHOLE = 256
"""Longest sequence whose keys one program keeps."""


@triton.jit
def _attend_whole(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
        weight = tl.exp2(scores - tl.max(scores, 1)[:, None])
        out = tl.dot(weight.to(v.dtype), v, input_precision="tf32x3") / tl.sum(weight, 1)[:, None]
        at = out_ptr + ((batch * length + rows[:, None]) * heads + head) * D + channel[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _attend_steps(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for start in range(0, length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        mask = (keys < length)[:, None]
        if D != D_PAD:
            mask = mask & (channel < D)[None, :]
        k = tl.load(k_base + keys[:, None] * k_n, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
        scores = tl.dot(q, k.T, input_precision="tf32x3") * scale + bias[None, :]
        peak = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(v_base + keys[:, None] * v_n, mask=mask, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        best = peak
    out = acc / total[:, None]
    at = out_ptr + ((batch * length + rows[:, None]) * heads + head) * D + channel[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def launch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend (B, H, N, D) tensors of any strides, with log₂ sizes (B, N) for bias; gives (B, N, H·D)."""
    batch, heads, length, channels = q.shape
    q, k, v = (part if part.stride(3) == 1 else part.contiguous() for part in (q, k, v))
    out = torch.empty(batch, length, heads * channels, dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(channels))
    inputs = (q, k, v, bias, out, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads, length, scale * LOG2E)
    wide = padded > 64 or q.dtype == torch.float32
    if q.dtype != torch.float32 and length <= (WHOLE // 2 if wide else WHOLE):
        block_n = max(16, triton.next_power_of_2(length))
        _attend_whole[(batch * heads,)](
            *inputs, D=channels, D_PAD=padded, BLOCK_M=32 if wide else 64, BLOCK_N=block_n, num_warps=4
        )
    else:
        block_m, block_n = (64, 32) if wide else (64, 128)
        _attend_steps[(batch * heads, triton.cdiv(length, block_m))](
            *inputs, D=channels, D_PAD=padded, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=2
        )
    return out
