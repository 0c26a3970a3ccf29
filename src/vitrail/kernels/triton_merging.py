"""Weighted means of groups, with the residual sum before and the LayerNorm after them, in one pass over memory.

The members of each group are listed contiguously (``triton_matching``), so each token is read once, means need no
atomics, and the same input gives the same bits. Sums are computed in float32. A group without members, or with members
of size 0 alone, becomes a zero token of size 0: padding.

The gradient also takes one pass: through the LayerNorm, plus the gradient of the tokens, to the members of each group.
Gradients of weights are summed by a fixed number of programs, each over its own tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels import launch as launching

WARPS = 2
PROGRAMS = 1056
"""Number of programs that sum gradients of weights: eight per multiprocessor of a large GPU."""


class Groups(NamedTuple):
    """Groups to merge: sizes before (None: all 1), members group by group, and where each group starts."""

    size: Tensor | None
    member: Tensor
    start: Tensor


class Norm(NamedTuple):
    """A LayerNorm's weight, bias and epsilon, and the dtype of its result."""

    weight: Tensor
    bias: Tensor
    eps: float
    dtype: torch.dtype


@triton.jit(do_not_specialize=["length", "kept"])
def _merge(
    x_ptr, y_ptr, gamma_ptr, add_ptr, size_ptr, member_ptr, start_ptr, weight_ptr, bias_ptr,
    out_ptr, out_size_ptr, out_log_ptr, norm_ptr, length, kept, eps,
    HAS_Y: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_ADD: tl.constexpr, HAS_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Compute one token per program: the mean of its members of ``x + γ·y``, its LayerNorm, and the token + ``add``."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // kept
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    at = row + batch  # start has one entry more per image
    first = tl.load(start_ptr + at)
    last = tl.load(start_ptr + at + 1)
    total = 1.0
    source = batch * length + tl.load(member_ptr + batch * length + tl.minimum(first, length - 1))
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
    total = tl.where(last > first, total, 0.0)
    token = tl.where(total > 0, token, 0.0)  # padding: no member, or members of size 0 alone
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
    """Compute the same for tokens that do not merge."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    token = _summed(x_ptr, y_ptr, gamma_ptr, row, channel, inside, HAS_Y, HAS_GAMMA, D)
    token = token.to(out_ptr.dtype.element_ty)
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


@triton.jit(do_not_specialize=["rows", "length", "kept"])
def _backward(
    grad_ptr, grad_norm_ptr, token_ptr, weight_ptr, y_ptr, gamma_ptr, size_ptr, out_size_ptr, member_ptr, start_ptr,
    dx_ptr, dy_ptr, part_ptr, rows, length, kept, eps,
    HAS_GRAD: tl.constexpr, HAS_NORM: tl.constexpr, HAS_DY: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_GROUPS: tl.constexpr, HAS_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Distribute the gradient of each token to the members of its group; sum those of weight, bias and γ."""
    channel = tl.arange(0, D_PAD)
    inside = channel < D
    weight = tl.zeros([D_PAD], tl.float32)
    gamma = tl.zeros([D_PAD], tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_GAMMA:
        gamma = tl.load(gamma_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for_weight = tl.zeros([D_PAD], tl.float32)
    for_bias = tl.zeros([D_PAD], tl.float32)
    for_gamma = tl.zeros([D_PAD], tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        grad = tl.zeros([D_PAD], tl.float32)
        if HAS_GRAD:
            grad = tl.load(grad_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            token = tl.load(token_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
            pull = tl.load(grad_norm_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
            centred = tl.where(inside, token - tl.sum(token, 0) / D, 0.0)
            scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
            normed = centred * scale
            for_weight += pull * normed
            for_bias += pull
            pull *= weight
            grad += scale * (pull - tl.sum(pull, 0) / D - normed * (tl.sum(pull * normed, 0) / D))
        if HAS_GROUPS:
            batch = row // kept
            first = tl.load(start_ptr + row + batch)
            last = tl.load(start_ptr + row + batch + 1)
            total = tl.load(out_size_ptr + row)
            for i in range(first, last):
                source = batch * length + tl.load(member_ptr + batch * length + i)
                share = 1.0
                if HAS_SIZE:
                    share = tl.load(size_ptr + source)
                member_grad = grad * tl.where(total > 0, share / total, 0.0)
                for_gamma += _write_grad(
                    member_grad, y_ptr, gamma, dx_ptr, dy_ptr, source, channel, inside, HAS_DY, HAS_GAMMA, D
                )
        else:
            for_gamma += _write_grad(grad, y_ptr, gamma, dx_ptr, dy_ptr, row, channel, inside, HAS_DY, HAS_GAMMA, D)
    part = part_ptr + tl.program_id(0) * (3 if HAS_GAMMA else 2) * D + channel
    if HAS_NORM:
        tl.store(part, for_weight, mask=inside)
        tl.store(part + D, for_bias, mask=inside)
    if HAS_GAMMA:
        tl.store(part + 2 * D, for_gamma, mask=inside)


@triton.jit
def _write_grad(
    grad, y_ptr, gamma, dx_ptr, dy_ptr, row, channel, inside,
    HAS_DY: tl.constexpr, HAS_GAMMA: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write a token's gradient, and (γ times) it for its branch; return the token's share of γ's gradient."""
    tl.store(dx_ptr + row * D + channel, grad.to(dx_ptr.dtype.element_ty), mask=inside)
    share = tl.zeros_like(grad)
    branch = grad
    if HAS_GAMMA:
        branch = grad * gamma
        share = grad * tl.load(y_ptr + row * D + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_DY:
        tl.store(dy_ptr + row * D + channel, branch.to(dy_ptr.dtype.element_ty), mask=inside)
    return share


def launch(
    x: Tensor,
    groups: Groups,
    y: Tensor | None = None,
    gamma: Tensor | None = None,
    norm: Norm | None = None,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Merge contiguous tokens ``x + γ·y`` (B, N, D); return them (+ ``add``), sizes, their log₂, normalized tokens."""
    batch, length, channels = x.shape
    kept = groups.start.shape[1] - 1
    out = torch.empty(batch, kept, channels, dtype=x.dtype, device=x.device)
    size = torch.empty(batch, kept, dtype=torch.float32, device=x.device)
    log_size = torch.empty_like(size)
    normed = torch.empty_like(out, dtype=norm.dtype) if norm is not None else None
    weight, bias, eps, _ = norm or (x, x, 0.0, x.dtype)
    constants = {
        "HAS_Y": y is not None, "HAS_GAMMA": gamma is not None, "HAS_ADD": add is not None,
        "HAS_SIZE": groups.size is not None, "HAS_NORM": norm is not None, **_width(channels),
    }  # fmt: skip
    tensors = (
        x, _or(y, x), _or(gamma, x), _or(add, x), _or(groups.size, x), groups.member, groups.start, weight, bias,
        out, size, log_size, _or(normed, x),
    )  # fmt: skip
    launching.launch(_merge, (batch * kept,), tensors, (length, kept, eps), constants, num_warps=WARPS)
    return out, size, log_size, normed


def launch_norm(
    x: Tensor, norm: Norm, y: Tensor | None = None, gamma: Tensor | None = None, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize contiguous tokens ``x + γ·y`` (B, N, D); return them (+ ``add``) and the normalized ones."""
    channels = x.shape[-1]
    normed = torch.empty_like(x, dtype=norm.dtype)
    out = torch.empty_like(x) if y is not None else x
    constants = {
        "HAS_Y": y is not None, "HAS_GAMMA": gamma is not None, "HAS_ADD": add is not None, "HAS_NORM": True,
        **_width(channels),
    }  # fmt: skip
    tensors = (x, _or(y, x), _or(gamma, x), _or(add, x), norm.weight, norm.bias, out, normed)
    launching.launch(_norm, (x.numel() // channels,), tensors, (norm.eps,), constants, num_warps=WARPS)
    return out, normed


def launch_sum(x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
    """Return ``x + γ·y`` for contiguous tokens (…, D), in the dtype of ``x``."""
    channels = x.shape[-1]
    out = torch.empty_like(x)
    constants = {
        "HAS_Y": True, "HAS_GAMMA": gamma is not None, "HAS_ADD": False, "HAS_NORM": False, **_width(channels),
    }  # fmt: skip
    tensors = (x, y, _or(gamma, x), x, x, x, out, out)
    launching.launch(_norm, (x.numel() // channels,), tensors, (0.0,), constants, num_warps=WARPS)
    return out


class Gradients(NamedTuple):
    """Gradients of ``x`` and ``y``, and of weight, bias and γ as rows (2 or 3, D) in the weight's dtype.

    Those of ``x`` and ``y`` are one tensor where they are equal: without γ, and with one dtype.
    """

    x: Tensor
    y: Tensor
    vectors: Tensor | None


class NormBack(NamedTuple):
    """Inputs of the gradient of a LayerNorm: the output's gradient, the input, weight and epsilon."""

    grad: Tensor
    token: Tensor
    weight: Tensor
    eps: float


def launch_backward(
    grad: Tensor | None,
    norm: NormBack | None,
    groups: Groups | None = None,
    merged_size: Tensor | None = None,
    y: Tensor | None = None,
    gamma: Tensor | None = None,
    branch: torch.dtype | None = None,
) -> Gradients:
    """Propagate gradients of tokens and of normalized tokens (B, kept, D) back to the tokens that merged (B, N, D).

    Args:
        grad: gradient of the tokens; None for none.
        norm: gradient of the LayerNorm; None for none.
        groups: groups that merged; None where nothing merged.
        merged_size: sizes after.
        y: the branch that γ scaled, if any.
        branch: dtype of the branch's gradient; None for that of the tokens.
    """
    grad = None if grad is None else grad.contiguous()
    norm = None if norm is None else norm._replace(grad=norm.grad.contiguous())
    like = grad if norm is None else norm.token
    assert like is not None
    batch, kept, channels = like.shape
    length = kept if groups is None else groups.member.shape[1]
    dx = torch.empty(batch, length, channels, dtype=like.dtype, device=like.device)
    shares = gamma is None and branch in (None, dx.dtype)
    dy = dx if shares else torch.empty_like(dx, dtype=branch)
    rows = batch * kept
    programs = min(rows, PROGRAMS)
    parts = torch.empty(programs, 2 if gamma is None else 3, channels, dtype=torch.float32, device=like.device)
    size, member, start = groups or (None, like, like)
    grad_norm, token, weight, eps = norm or (like, like, like, 0.0)
    constants = {
        "HAS_GRAD": grad is not None, "HAS_NORM": norm is not None, "HAS_DY": not shares,
        "HAS_GAMMA": gamma is not None, "HAS_GROUPS": groups is not None, "HAS_SIZE": size is not None,
        **_width(channels),
    }  # fmt: skip
    tensors = (
        _or(grad, like), grad_norm, token, weight, _or(y, like), _or(gamma, like), _or(size, like),
        _or(merged_size, like), member, start, dx, dy, parts,
    )  # fmt: skip
    launching.launch(_backward, (programs,), tensors, (rows, length, kept, eps), constants, num_warps=WARPS)
    return Gradients(dx, dy, None if norm is None else parts.sum(0).to(norm.weight.dtype))


def _width(channels: int) -> dict[str, int]:
    return {"D": channels, "D_PAD": launching.power_of_two(channels)}


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor
