"""Attention, forward and backward, with separate or packed queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.kernels.ops.base import operator


@operator("attend")
def attend(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> Tensor:
    """Compute proportional attention (B, H, N, D); return (B, N, H·D)."""
    from vitrail.kernels import triton_attention

    return triton_attention.launch(q, k, v, log2_size, scale)[0]


@attend.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1] * q.shape[3])


@operator("attend_keep")
def attend_keep(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute ``attend`` and log₂ of each query's sum of weights (B, H, N), for the gradient."""
    from vitrail.kernels import triton_attention

    out, sums = triton_attention.launch(q, k, v, log2_size, scale, keep=True)
    assert sums is not None
    return out, sums


@attend_keep.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, channels = q.shape
    return q.new_empty(batch, length, heads * channels), q.new_empty(batch, heads, length, dtype=torch.float32)


@operator("attend_back")
def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    from vitrail.kernels import triton_attention_backward as triton_attention_back

    into = (_heads_like(q), _heads_like(k), _heads_like(v))
    triton_attention_back.launch(grad, (q, k, v), log2_size, out, sums, scale, into)
    return into


@attend_back.op.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, q: Tensor, k: Tensor, v: Tensor, log2_size, out, sums, scale
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads_like(q), _heads_like(k), _heads_like(v)


def _heads_like(part: Tensor) -> Tensor:
    """Return an empty (B, H, N, D) tensor with tokens before heads in memory, as linear layers write them."""
    batch, heads, length, channels = part.shape
    return part.new_empty(batch, length, heads, channels).transpose(1, 2)


def _keep_for_attend(ctx: Any, inputs: Any, output: Any) -> None:
    *parts, log2_size, ctx.scale = inputs
    ctx.save_for_backward(*parts, log2_size, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_of_attend(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    return *attend_back(grad, *ctx.saved_tensors, ctx.scale), None, None


attend_keep.differentiable(_keep_for_attend, _backward_of_attend)


@operator("attention_received")
def attention_received(q: Tensor, k: Tensor, log2_size: Tensor, share: Tensor, scale: float) -> Tensor:
    """Compute the sum of the attention that each key receives (B, H, N), each query counting with its share."""
    from vitrail.kernels import triton_received

    return triton_received.launch(q, k, log2_size, share, scale)


@attention_received.op.register_fake
def _(q: Tensor, k: Tensor, log2_size: Tensor, share: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("attend_packed")
def attend_packed(qkv: Tensor, log2_size: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention from packed queries, keys and values (B, N, 3·H·D), whose gradient is packed too."""
    from vitrail.kernels import triton_attention

    out, sums = triton_attention.launch(*unpack(qkv, heads), log2_size, scale, keep=True)
    assert sums is not None
    return out, sums


@attend_packed.op.register_fake
def _(qkv: Tensor, log2_size: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, length, channels = qkv.shape
    return qkv.new_empty(batch, length, channels // 3), qkv.new_empty(batch, heads, length, dtype=torch.float32)


@operator("attend_packed_back")
def attend_packed_back(
    grad: Tensor, qkv: Tensor, log2_size: Tensor, out: Tensor, sums: Tensor, heads: int, scale: float
) -> Tensor:
    """Return the packed gradient of queries, keys and values."""
    from vitrail.kernels import triton_attention_backward as triton_attention_back

    into = torch.empty_like(qkv)
    triton_attention_back.launch(grad, unpack(qkv, heads), log2_size, out, sums, scale, unpack(into, heads))
    return into


@attend_packed_back.op.register_fake
def _(grad, qkv: Tensor, log2_size, out, sums, heads, scale) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.empty_like(qkv)


def unpack(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries, keys and values (B, H, N, D) in a packed tensor (B, N, 3·H·D)."""
    batch, length, channels = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, channels // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _keep_for_packed(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, log2_size, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(qkv, log2_size, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_of_packed(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    return attend_packed_back(grad, *ctx.saved_tensors, ctx.heads, ctx.scale), None, None, None


attend_packed.differentiable(_keep_for_packed, _backward_of_packed)
