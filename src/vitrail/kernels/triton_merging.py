"""Weighted means of groups with the sum before and the LayerNorm after them, in one pass over memory.

A group's members are listed one after the other (``triton_matching``), so each token is read once, means need no
atomics, and the same input gives the same bits. Sums run in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = {"merge": 2, "norm": 2}


class Groups(NamedTuple):
    """What is merged: sizes before (None for all one), members group by group, and where each group begins."""

    size: Tensor | None
    member: Tensor
    start: Tensor


class Norm(NamedTuple):
    """A LayerNorm's weight, bias and epsilon."""

    weight: Tensor
    bias: Tensor
    eps: float


@triton.jit
def _merge(
    x_ptr, y_ptr, gamma_ptr, add_ptr, size_ptr, member_ptr, start_ptr, weight_ptr, bias_ptr,
    out_ptr, out_size_ptr, out_log_ptr, norm_ptr, length, kept, eps,
    HAS_Y: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_ADD: tl.constexpr, HAS_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One program makes one token: the mean of its members of ``x + γ·y``, its LayerNorm, and the token + ``add``."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // kept
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    at = row + batch  # start has one entry more per picture
    first = tl.load(start_ptr + at)
    last = tl.load(start_ptr + at + 1)
    total = 1.0
    source = batch * length + tl.load(member_ptr + batch * length + first)
    if HAS_SIZE:
        total = tl.load(size_ptr + source)
    token = _summed(x_ptr, y_ptr, gamma_ptr, source, channel, inside, HAS_Y, HAS_GAMMA, D)
    if last - first > 1:  # a token alone is itself, without a rounding
        token *= total
        for i in range(first + 1, last):
            source = batch * length + tl.load(member_ptr + batch * length + i)
            share = 1.0
            if HAS_SIZE:
                share = tl.load(size_ptr + source)
            token += share * _summed(x_ptr, y_ptr, gamma_ptr, source, channel, inside, HAS_Y, HAS_GAMMA, D)
            total += share
        token = token / total
    tl.store(out_size_ptr + row, total)
    tl.store(out_log_ptr + row, tl.log2(total))
    token = token.to(out_ptr.dtype.element_ty)
    _finish(token, add_ptr, weight_ptr, bias_ptr, out_ptr, norm_ptr, row, channel, inside, eps, HAS_ADD, HAS_NORM, D)


@triton.jit
def _norm(
    x_ptr, y_ptr, gamma_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, norm_ptr, eps,
    HAS_Y: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_ADD: tl.constexpr, HAS_NORM: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The same for a token that stays alone."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    token = _summed(x_ptr, y_ptr, gamma_ptr, row, channel, inside, HAS_Y, HAS_GAMMA, D)
    token = token.to(norm_ptr.dtype.element_ty)
    _finish(
        token, add_ptr, weight_ptr, bias_ptr, out_ptr, norm_ptr, row, channel, inside, eps,
        HAS_ADD, HAS_NORM, D, HAS_Y,
    )  # fmt: skip


@triton.jit
def _summed(
    x_ptr, y_ptr, gamma_ptr, row, channel, inside,
    HAS_Y: tl.constexpr, HAS_GAMMA: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    value = tl.load(x_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        branch = tl.load(y_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
        if HAS_GAMMA:
            branch *= tl.load(gamma_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        value += branch
    return value


@triton.jit
def _finish(
    token, add_ptr, weight_ptr, bias_ptr, out_ptr, norm_ptr, row, channel, inside, eps,
    HAS_ADD: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr, WRITES: tl.constexpr = True,
):  # fmt: skip
    value = token.to(tl.float32)
    if WRITES:
        kept = value
        if HAS_ADD:
            kept += tl.load(add_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + channel, kept.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_NORM:
        mean = tl.sum(value, 0) / D
        centred = tl.where(inside, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        normed = centred * scale * weight + bias
        tl.store(norm_ptr + row * D + channel, normed.to(norm_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread(
    grad_ptr, size_ptr, out_size_ptr, target_ptr, out_ptr, length, kept,
    HAS_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Backward of the mean: each member gets its share of its group's gradient."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // length
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    group = batch * kept + tl.load(target_ptr + row)
    share = 1.0 / tl.load(out_size_ptr + group)
    if HAS_SIZE:
        share *= tl.load(size_ptr + row)
    grad = tl.load(grad_ptr + group * D + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + channel, (share * grad).to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    x: Tensor,
    groups: Groups,
    y: Tensor | None = None,
    gamma: Tensor | None = None,
    norm: Norm | None = None,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Merge contiguous tokens ``x + γ·y`` (B, N, D): tokens (+ ``add``), sizes, their log₂, normalised tokens."""
    batch, length, channels = x.shape
    kept = groups.start.shape[1] - 1
    out = torch.empty(batch, kept, channels, dtype=x.dtype, device=x.device)
    size = torch.empty(batch, kept, dtype=torch.float32, device=x.device)
    log_size = torch.empty_like(size)
    normed = torch.empty_like(out) if norm is not None else None
    _merge[(batch * kept,)](
        x, _or(y, x), _or(gamma, x), _or(add, x), _or(groups.size, x), groups.member, groups.start,
        *((norm.weight, norm.bias) if norm is not None else (x, x)),
        out, size, log_size, _or(normed, x), length, kept, norm.eps if norm is not None else 0.0,
        HAS_Y=y is not None, HAS_GAMMA=gamma is not None, HAS_ADD=add is not None,
        HAS_SIZE=groups.size is not None, HAS_NORM=norm is not None,
        D=channels, D_PAD=triton.next_power_of_2(channels), num_warps=WARPS["merge"],
    )  # fmt: skip
    return out, size, log_size, normed


def launch_norm(
    x: Tensor, norm: Norm, y: Tensor | None = None, gamma: Tensor | None = None, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise contiguous tokens ``x + γ·y`` (B, N, D); gives them (+ ``add``) and the normalised ones."""
    channels = x.shape[-1]
    normed = torch.empty_like(x)
    out = torch.empty_like(x) if y is not None else x
    _norm[(x.numel() // channels,)](
        x, _or(y, x), _or(gamma, x), _or(add, x), norm.weight, norm.bias, out, normed, norm.eps,
        HAS_Y=y is not None, HAS_GAMMA=gamma is not None, HAS_ADD=add is not None, HAS_NORM=True,
        D=channels, D_PAD=triton.next_power_of_2(channels), num_warps=WARPS["norm"],
    )  # fmt: skip
    return out, normed


def launch_sum(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    """Give ``x + γ·y`` for contiguous tokens (…, D)."""
    channels = x.shape[-1]
    out = torch.empty_like(x)
    _norm[(x.numel() // channels,)](
        x, y, gamma, x, x, x, out, out, 0.0,
        HAS_Y=True, HAS_GAMMA=True, HAS_ADD=False, HAS_NORM=False,
        D=channels, D_PAD=triton.next_power_of_2(channels), num_warps=WARPS["norm"],
    )  # fmt: skip
    return out


def launch_backward(grad: Tensor, size: Tensor | None, out_size: Tensor, target: Tensor) -> Tensor:
    """Give each token (B, N, D) its share of the gradient of its group (B, kept, D)."""
    batch, kept, channels = grad.shape
    length = target.shape[1]
    out = torch.empty(batch, length, channels, dtype=grad.dtype, device=grad.device)
    _spread[(batch * length,)](
        grad.contiguous(), _or(size, grad), out_size, target, out, length, kept,
        HAS_SIZE=size is not None, D=channels, D_PAD=triton.next_power_of_2(channels), num_warps=2,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor
