"""The attention that each token receives, as two kernels: no N × N matrix is written.

The first computes log₂ of each query's sum of weights, the second walks over the queries for each block of keys and
adds up the weights. ``bias`` is log₂ of each key's size, as in `triton_attention`; ``share`` is the weight of each
query in the mean, 0 for padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching
from vitrail.kernels.triton_attention import LOG2E, readable, width


@triton.jit(do_not_specialize=["heads", "length"])
def _log_sums(
    q_ptr, k_ptr, bias_ptr, sum_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, D_PAD)
    row_mask = (rows < length)[:, None] & (channel < D)[None, :]
    q = tl.load(q_ptr + batch * q_b + head * q_h + rows[:, None] * q_n + channel[None, :], mask=row_mask, other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, length, BLOCK_N, num_stages=2):
        keys = start + tl.arange(0, BLOCK_N)
        mask = (keys < length)[:, None] & (channel < D)[None, :]
        k = tl.load(k_ptr + batch * k_b + head * k_h + keys[:, None] * k_n + channel[None, :], mask=mask, other=0.0)
        bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
        scores = tl.dot(q, k.T, input_precision="tf32x3") * scale + bias[None, :]
        peak = tl.maximum(best, tl.max(scores, 1))
        known = peak > float("-inf")  # a block of padding alone leaves the sum at 0
        total = tl.where(known, total * tl.exp2(best - peak) + tl.sum(tl.exp2(scores - peak[:, None]), 1), 0.0)
        best = peak
    tl.store(sum_ptr + (batch * heads + head) * length + rows, best + tl.log2(total), mask=rows < length)


@triton.jit(do_not_specialize=["heads", "length"])
def _received(
    q_ptr, k_ptr, bias_ptr, sum_ptr, share_ptr, out_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n,
    heads, length, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D_PAD)
    mask = (keys < length)[:, None] & (channel < D)[None, :]
    k = tl.load(k_ptr + batch * k_b + head * k_h + keys[:, None] * k_n + channel[None, :], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + batch * length + keys, mask=keys < length, other=float("-inf"))
    row_base = (batch * heads + head) * length
    received = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, length, BLOCK_M, num_stages=2):
        rows = first + tl.arange(0, BLOCK_M)
        row_mask = (rows < length)[:, None] & (channel < D)[None, :]
        q = tl.load(q_ptr + batch * q_b + head * q_h + rows[:, None] * q_n + channel[None, :], mask=row_mask, other=0.0)
        total = tl.load(sum_ptr + row_base + rows, mask=rows < length, other=float("inf"))
        share = tl.load(share_ptr + batch * length + rows, mask=rows < length, other=0.0)
        scores = tl.dot(k, q.T, input_precision="tf32x3") * scale + bias[:, None]
        received += tl.sum(tl.exp2(scores - total[None, :]) * share[None, :], 1)
    tl.store(out_ptr + row_base + keys, received, mask=keys < length)


def launch(q: Tensor, k: Tensor, bias: Tensor, share: Tensor, scale: float) -> Tensor:
    """Compute the weighted sum over the queries of the attention that each key receives (B, H, N), in float32.

    ``q`` and ``k`` are (B, H, N, D) of any strides; ``bias`` (log₂ sizes) and ``share`` are float32 (B, N).
    """
    batch, heads, length, channels = q.shape
    q, k = readable(q), readable(k)
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    out = torch.empty_like(sums)
    padded, wide = width(q)
    block_m, block_n = (32, 32) if wide else (64, 64)
    numbers = (*q.stride()[:3], *k.stride()[:3], heads, length, scale * LOG2E)
    constants = {"D": channels, "D_PAD": padded, "BLOCK_M": block_m, "BLOCK_N": block_n}
    grids = (batch * heads, launching.blocks(length, block_m)), (batch * heads, launching.blocks(length, block_n))
    launching.launch(_log_sums, grids[0], (q, k, bias, sums), numbers, constants, num_warps=4)
    launching.launch(_received, grids[1], (q, k, bias, sums, share, out), numbers, constants, num_warps=4)
    return out
