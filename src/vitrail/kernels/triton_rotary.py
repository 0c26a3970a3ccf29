"""Rotary position as one pass over queries or keys: tokens in front stay, the others turn by a table.

Each channel has a partner, its neighbor or the channel half a head away: ``out = x · cos ± partner · sin``. The
gradient is the same sum with the sines of the partners and the other sign.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching


@triton.jit(do_not_specialize=["heads", "length", "front"])
def _rotate(
    x_ptr, table_ptr, out_ptr, x_b, x_h, x_n, table_b, table_h, table_n, heads, length, front,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Turn all heads of one token per program."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.arange(0, H_PAD)[:, None].to(tl.int64)
    channel = tl.arange(0, D_PAD)[None, :]
    if INTERLEAVED:
        partner = channel ^ 1
        first = channel % 2 == 0
    else:
        partner = (channel + D // 2) % D
        first = channel < D // 2
    inside = (head < heads) & (channel < D)
    at = x_ptr + batch * x_b + head * x_h + token * x_n
    value = tl.load(at + channel, mask=inside, other=0.0)
    if token >= front:
        other = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
        entry = table_ptr + batch * table_b + head * table_h + (token - front) * table_n
        cosine = tl.load(entry + D + channel, mask=inside, other=0.0).to(tl.float32)
        if BACK:
            sine = tl.load(entry + partner, mask=inside, other=0.0).to(tl.float32)
            sine = tl.where(first, sine, -sine)
        else:
            sine = tl.load(entry + channel, mask=inside, other=0.0).to(tl.float32)
            sine = tl.where(first, -sine, sine)
        value = (value.to(tl.float32) * cosine + other * sine).to(value.dtype)
    tl.store(out_ptr + (row * heads + head) * D + channel, value, mask=inside)


def launch(x: Tensor, table: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Turn the last tokens of (B, H, N, d) by a table of sines and cosines (…, P, 2·d); tokens lie before heads.

    Args:
        back: whether ``x`` is the gradient of the result, and its own gradient is wanted.
    """
    batch, heads, length, channels = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    table = table if table.stride(-1) == 1 else table.contiguous()
    while table.dim() < 4:
        table = table.unsqueeze(0)
    strides = [0 if size == 1 else stride for size, stride in zip(table.shape[:2], table.stride(), strict=False)]
    out = torch.empty(batch, length, heads, channels, dtype=x.dtype, device=x.device)
    numbers = (*x.stride()[:3], *strides, table.stride(2), heads, length, length - table.shape[2])
    constants = {
        "INTERLEAVED": interleaved, "BACK": back, "H_PAD": launching.power_of_two(heads), "D": channels,
        "D_PAD": launching.power_of_two(channels),
    }  # fmt: skip
    launching.launch(_rotate, (batch * length,), (x, table, out), numbers, constants, num_warps=4)
    return out.transpose(1, 2)
