"""Matching, merging and LayerNorm, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.kernels.ops.base import operator


@operator("match")
def match(k: Tensor, r: int, protected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Match tokens by keys (B, H, N, D); return target (B, N), member (B, N), start (B, N − r + 1)."""
    from vitrail.kernels import triton_matching

    return triton_matching.launch(k, r, protected)


@match.op.register_fake
def _(k: Tensor, r: int, protected: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, length, _ = k.shape
    return (
        k.new_empty(batch, length, dtype=torch.int64),
        k.new_empty(batch, length, dtype=torch.int32),
        k.new_empty(batch, length - r + 1, dtype=torch.int32),
    )


@operator("merge")
def merge(x: Tensor, size: Tensor | None, member: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge tokens (B, N, D); return tokens, sizes and their log₂."""
    from vitrail.kernels.triton_merging import Groups, launch

    return launch(x.contiguous(), Groups(size, member, start))[:3]


@merge.op.register_fake
def _(x: Tensor, size: Tensor | None, member: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, kept = x.shape[0], start.shape[1] - 1
    return (
        x.new_empty(batch, kept, x.shape[2]),
        x.new_empty(batch, kept, dtype=torch.float32),
        x.new_empty(batch, kept, dtype=torch.float32),
    )


@operator("merge_back")
def merge_back(grad: Tensor, size: Tensor | None, merged_size: Tensor, member: Tensor, start: Tensor) -> Tensor:
    """Return each token's share of the gradient of its group."""
    from vitrail.kernels.triton_merging import Groups, launch_backward

    return launch_backward(grad, None, Groups(size, member, start), merged_size).x


@merge_back.op.register_fake
def _(grad: Tensor, size: Tensor | None, merged_size: Tensor, member: Tensor, start: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], member.shape[1], grad.shape[2])


def _keep_for_merge(ctx: Any, inputs: Any, output: Any) -> None:
    _, size, member, start = inputs
    ctx.save_for_backward(size, output[1], member, start)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_merge(ctx: Any, grad: Tensor, *_: None) -> tuple[Any, ...]:
    return merge_back(grad, *ctx.saved_tensors), None, None, None


merge.differentiable(_keep_for_merge, _backward_of_merge)


@operator("merge_norm")
def merge_norm(
    x: Tensor,
    y: Tensor | None,
    gamma: Tensor | None,
    size: Tensor | None,
    member: Tensor,
    start: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    normed: torch.dtype,
    add: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge ``x + γ·y``, or ``x``; return tokens (+ ``add``, without gradient), sizes, their log₂, and LayerNorm.

    Tokens have the dtype of ``x``, their LayerNorm has ``normed``.
    """
    from vitrail.kernels.triton_merging import Groups, Norm, launch

    norm = Norm(weight, bias, eps, normed)
    out, sizes, logs, normalized = launch(x, Groups(size, member, start), y, gamma, norm, add)
    assert normalized is not None
    return out, sizes, logs, normalized


@merge_norm.op.register_fake
def _(  # type: ignore[no-untyped-def]
    x: Tensor, y, gamma, size, member, start: Tensor, weight, bias, eps, normed: torch.dtype, add
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, kept = x.shape[0], start.shape[1] - 1
    tokens = x.new_empty(batch, kept, x.shape[2])
    sizes = x.new_empty(batch, kept, dtype=torch.float32)
    return tokens, sizes, torch.empty_like(sizes), torch.empty_like(tokens, dtype=normed)


@operator("norm_back")
def norm_back(
    grad: Tensor | None,
    grad_norm: Tensor,
    token: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor | None,
    gamma: Tensor | None,
    size: Tensor | None,
    merged_size: Tensor | None,
    member: Tensor | None,
    start: Tensor | None,
    branch: torch.dtype,
) -> list[Tensor]:
    """Return the gradients of x and of weight, bias and γ as rows of one tensor; that of y where it is another.

    It is another with γ, and where its dtype ``branch`` is not that of the tokens.
    """
    from vitrail.kernels.triton_merging import Groups, NormBack, launch_backward

    groups = None if member is None or start is None else Groups(size, member, start)
    found = launch_backward(grad, NormBack(grad_norm, token, weight, eps), groups, merged_size, y, gamma, branch)
    assert found.vectors is not None
    return [found.x, found.vectors] if found.y is found.x else [found.x, found.vectors, found.y]


@norm_back.op.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, grad_norm, token: Tensor, weight: Tensor, eps, y, gamma, size, merged_size, member, start, branch
) -> list[Tensor]:
    batch, kept, channels = token.shape
    x = token.new_empty(batch, kept if member is None else member.shape[1], channels)
    vectors = weight.new_empty(2 if gamma is None else 3, channels)
    return [x, vectors] if gamma is None and branch == x.dtype else [x, vectors, torch.empty_like(x, dtype=branch)]


def _keep_for_merge_norm(ctx: Any, inputs: Any, output: Any) -> None:
    _, y, gamma, size, member, start, weight, _, ctx.eps, _, add = inputs
    assert add is None
    ctx.branch = None if y is None else y.dtype
    out, sizes, logs, _ = output
    ctx.save_for_backward(out, weight, y if gamma is not None else None, gamma, size, sizes, member, start)
    ctx.mark_non_differentiable(sizes, logs)
    ctx.set_materialize_grads(False)


def _backward_of_merge_norm(ctx: Any, grad: Tensor, _: None, __: None, grad_norm: Tensor) -> tuple[Any, ...]:
    out, weight, *rest = ctx.saved_tensors
    x, vectors, *y = norm_back(grad, grad_norm, out, weight, ctx.eps, *rest, ctx.branch or out.dtype)
    dweight, dbias, *dgamma = vectors.unbind(0)
    dy = y or [None if ctx.branch is None else x]
    return x, *dy, *(dgamma or [None]), None, None, None, dweight, dbias, None, None, None


merge_norm.differentiable(_keep_for_merge_norm, _backward_of_merge_norm)


@operator("norm")
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, normed: torch.dtype) -> Tensor:
    """Compute LayerNorm over the last axis of contiguous tokens, in the dtype ``normed``."""
    from vitrail.kernels.triton_merging import Norm, launch_norm

    return launch_norm(x, Norm(weight, bias, eps, normed))[1]


@norm.op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, normed: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=normed)


@operator("add_scaled")
def add_scaled(x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
    """Compute ``x + γ·y`` for contiguous tokens, in the dtype of ``x``."""
    from vitrail.kernels.triton_merging import launch_sum

    return launch_sum(x, y, gamma)


@add_scaled.op.register_fake
def _(x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@operator("add_norm")
def add_norm(
    x: Tensor,
    y: Tensor,
    gamma: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    normed: torch.dtype,
    add: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``x + γ·y`` (+ ``add``, without gradient), and its LayerNorm (without ``add``) as ``normed``."""
    from vitrail.kernels.triton_merging import Norm, launch_norm

    return launch_norm(x, Norm(weight, bias, eps, normed), y, gamma, add)


@add_norm.op.register_fake
def _(  # type: ignore[no-untyped-def]
    x: Tensor, y, gamma, weight, bias, eps, normed: torch.dtype, add
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=normed)


def _keep_for_add_norm(ctx: Any, inputs: Any, output: Any) -> None:
    _, y, gamma, weight, _, ctx.eps, _, add = inputs
    assert add is None
    ctx.branch = y.dtype
    ctx.save_for_backward(output[0], weight, y if gamma is not None else None, gamma)
    ctx.set_materialize_grads(False)


def _backward_of_add_norm(ctx: Any, grad: Tensor, grad_norm: Tensor) -> tuple[Any, ...]:
    out, weight, y, gamma = ctx.saved_tensors
    rest = (y, gamma, None, None, None, None, ctx.branch)
    x, vectors, *dy = norm_back(grad, grad_norm, out, weight, ctx.eps, *rest)
    dweight, dbias, *dgamma = vectors.unbind(0)
    return x, *(dy or [x]), *(dgamma or [None]), dweight, dbias, None, None, None


add_norm.differentiable(_keep_for_add_norm, _backward_of_add_norm)


class NormResidual(torch.autograd.Function):
    """Return tokens unchanged, for the residual sum, and their LayerNorm; both gradients take one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, normed: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return x, norm.function(x, weight, bias, eps, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_norm: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx, vectors = norm_back(grad, grad_norm, x, weight, ctx.eps, None, None, None, None, None, None, x.dtype)
        return dx, vectors[0], vectors[1], None, None


def norm_residual(x: Tensor, weight: Tensor, bias: Tensor, eps: float, normed: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return contiguous tokens unchanged, and their LayerNorm in the dtype ``normed``.

    The compiler fuses the gradients itself.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return x, torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(normed)
    if torch.is_grad_enabled():
        return NormResidual.apply(x, weight, bias, eps, normed)
    return x, norm(x, weight, bias, eps, normed)
