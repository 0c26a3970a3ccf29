"""The kernels as operators that ``torch.compile`` and autograd know: shapes without values, and gradients.

Implementations import Triton when they first run, so that loading Vitrail does not. Where neither the compiler nor
autograd looks on, they are called as they are: an operator's dispatch costs more than a small kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


class Operator:
    """A function that is an operator for the compiler and for autograd, and itself otherwise."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.op = custom_op(f"vitrail::{name}", function, mutates_args=())
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self.op(*args) if torch.compiler.is_compiling() or _is_watched(args) else self.function(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of a function."""
    return functools.partial(Operator, name)


def _is_watched(args: tuple[Any, ...]) -> bool:
    """Whether autograd, a tensor without values, or a mode such as the exporter's wants to see the operator."""
    if torch._C._len_torch_dispatch_stack():
        return True
    tensors = [value for value in args if isinstance(value, Tensor)]
    grads = torch.is_grad_enabled()
    return any((grads and x.requires_grad) or type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)


@operator("attend")
def attend(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> Tensor:
    """Attend (B, H, N, D) in proportion to sizes; gives (B, N, H·D)."""
    from vitrail.kernels import triton_attention

    return triton_attention.launch(q, k, v, log2_size, scale)


@attend.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log2_size: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1] * q.shape[3])


@operator("match")
def match(k: Tensor, r: int, protected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Match by keys (B, H, N, D): target (B, N), member (B, N), start (B, N − r + 1)."""
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
def merge(
    x: Tensor, size: Tensor | None, target: Tensor, member: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge tokens (B, N, D): tokens, sizes and their log₂."""
    from vitrail.kernels.triton_merging import Groups, launch

    return launch(x.contiguous(), Groups(size, member, start))[:3]


@merge.op.register_fake
def _(x: Tensor, size: Tensor | None, target: Tensor, member: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, kept = x.shape[0], start.shape[1] - 1
    return (
        x.new_empty(batch, kept, x.shape[2]),
        x.new_empty(batch, kept, dtype=torch.float32),
        x.new_empty(batch, kept, dtype=torch.float32),
    )


@operator("spread")
def spread(grad: Tensor, size: Tensor | None, merged_size: Tensor, target: Tensor) -> Tensor:
    """Give each token its share of its group's gradient: the backward of ``merge``."""
    from vitrail.kernels.triton_merging import launch_backward

    return launch_backward(grad, size, merged_size, target)


@spread.op.register_fake
def _(grad: Tensor, size: Tensor | None, merged_size: Tensor, target: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], target.shape[1], grad.shape[2])


def _keep_for_merge(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, size, target, _, _ = inputs
    ctx.has_size = size is not None
    ctx.save_for_backward(*((size,) if size is not None else ()), output[1], target)


def _backward_of_merge(ctx, grad, *_):  # type: ignore[no-untyped-def]
    *size, merged_size, target = ctx.saved_tensors
    return spread.op(grad, size[0] if ctx.has_size else None, merged_size, target), None, None, None, None


merge.op.register_autograd(_backward_of_merge, setup_context=_keep_for_merge)


@operator("merge_norm")
def merge_norm(
    x: Tensor,
    y: Tensor,
    gamma: Tensor | None,
    size: Tensor | None,
    member: Tensor,
    start: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    add: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge ``x + γ·y``: tokens (+ ``add``), sizes, their log₂, and the tokens after a LayerNorm."""
    from vitrail.kernels.triton_merging import Groups, Norm, launch

    out, sizes, logs, normed = launch(x, Groups(size, member, start), y, gamma, Norm(weight, bias, eps), add)
    assert normed is not None
    return out, sizes, logs, normed


@merge_norm.op.register_fake
def _(  # type: ignore[no-untyped-def]
    x: Tensor, y, gamma, size, member, start: Tensor, weight, bias, eps, add
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, kept = x.shape[0], start.shape[1] - 1
    tokens = x.new_empty(batch, kept, x.shape[2])
    sizes = x.new_empty(batch, kept, dtype=torch.float32)
    return tokens, sizes, torch.empty_like(sizes), torch.empty_like(tokens)


@operator("norm")
def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of contiguous tokens."""
    from vitrail.kernels.triton_merging import Norm, launch_norm

    return launch_norm(x, Norm(weight, bias, eps))[1]


@norm.op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@operator("add_scaled")
def add_scaled(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    """``x + γ·y`` for contiguous tokens."""
    from vitrail.kernels.triton_merging import launch_sum

    return launch_sum(x, y, gamma)


@add_scaled.op.register_fake
def _(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("add_norm")
def add_norm(
    x: Tensor, y: Tensor, gamma: Tensor | None, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``x + γ·y`` (+ ``add``), and its LayerNorm (without)."""
    from vitrail.kernels.triton_merging import Norm, launch_norm

    return launch_norm(x, Norm(weight, bias, eps), y, gamma, add)


@add_norm.op.register_fake
def _(x: Tensor, y, gamma, weight, bias, eps, add) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(x)
