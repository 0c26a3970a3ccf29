"""Rotary position, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.kernels.ops.base import operator


@operator("rotate")
def rotate(x: Tensor, table: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Turn the last tokens of queries or keys (B, H, N, d) by a table (…, P, 2·d); with ``back``, their gradient."""
    from vitrail.kernels import triton_rotary

    return triton_rotary.launch(x, table, interleaved, back)


@rotate.op.register_fake
def _(x: Tensor, table: Tensor, interleaved: bool, back: bool) -> Tensor:
    batch, heads, length, channels = x.shape
    return x.new_empty(batch, length, heads, channels).transpose(1, 2)


def _keep_for_rotate(ctx: Any, inputs: Any, output: Any) -> None:
    _, table, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(table)


def _backward_of_rotate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (table,) = ctx.saved_tensors
    return rotate(grad, table, ctx.interleaved, not ctx.back), None, None, None


rotate.differentiable(_keep_for_rotate, _backward_of_rotate)
