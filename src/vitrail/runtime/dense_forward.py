"""The dense path: blocks that consist of their matrices alone, and patch embeddings, in half precision on a GPU.

A block equals ``merged_forward`` in fewer passes over memory: the residual sum after attention, the merge and the
LayerNorm before the MLP are one kernel, and so are their gradients. Methods without a fused twin decide after the
residual sum; weighted means and the LayerNorm are one kernel for them, too. For inference, GELU is the epilogue of the
first linear layer and the residual sum that of the second, whose bias is added by the kernel that writes the tokens.

Patches do not overlap, so their convolution is a product of (patches × pixels) and (pixels × channels). Convolution
kernels do not exploit that and take many times as long, which matters once the blocks are fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, DenseBlock
from vitrail.kernels import KernelAssignment, ops
from vitrail.merging import Context, MergeState, Method, Reduction
from vitrail.merging.method import Projections
from vitrail.runtime.plan import Plan

Read = Callable[[Tensor, Tensor], None]

Reduce = Callable[[Tensor, Tensor, Projections], Reduction | None]
"""Reduces tokens after attention, given also their LayerNorm before it and their queries, keys and values."""


HALF = (torch.bfloat16, torch.float16)
"""Dtypes of matrix products on the dense path."""


def work_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with ``x``: autocast's where it is on, or the dtype of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def serves(x: Tensor, plan: Plan, state: MergeState) -> bool:
    """Return whether the dense path runs here: half precision on a GPU, in paper order; compiled, with a fused twin.

    Under autocast tokens are float32, or have its dtype.
    """
    method = plan.method
    return (
        (dtype := work_dtype(x)) in HALF
        and x.dtype in (dtype, torch.float32)
        and isinstance(state.protected, int)
        and plan.order == "paper"
        and (method.twin in kernels.TWINS or _serves_unfused(method, state))
        and state.restorer is None
        and kernels.usable(x)
    )


def _serves_unfused(method: Method, state: MergeState) -> bool:
    """Return whether the dense path serves a method without a fused twin; a compiler fuses these better by itself."""
    return (
        method.scope == "pass"
        and not (method.relaxes and method.training)
        and not (state.size is not None and state.size.requires_grad)
        and not torch.compiler.is_compiling()
    )


def dense_block(parts: BlockAdapter, block: nn.Module, x: Tensor, plan: Plan, state: MergeState) -> DenseBlock | None:
    """Return a block as its matrices; None where it is more than that, or the kernels do not run here."""
    if not serves(x, plan, state):
        return None
    dense = _find(parts, block) if torch.compiler.is_compiling() else _found(parts, block)
    if dense is not None and any(gamma is not None and _widens(gamma, x) for gamma in dense.gammas):
        return None
    return dense


def _widens(gamma: Tensor, x: Tensor) -> bool:
    """Return whether a layer scale makes the residual sum's dtype another than that of the tokens."""
    return gamma.dtype != x.dtype and torch.promote_types(gamma.dtype, x.dtype) != x.dtype


def _found(parts: BlockAdapter, block: nn.Module) -> DenseBlock | None:
    """Return a block's matrices, cached where they last."""
    known = _known.get(block)
    if known is not None and known.holds():
        return known.dense
    dense = _find(parts, block)
    if dense is not None and _lasts(block):
        _known[block] = Known.of(block, dense)
    return dense


def _lasts(block: nn.Module) -> bool:
    """Return whether a block keeps its weights for the next pass; rounded weights are made for each pass."""
    return all(type(weight) is nn.Parameter for weight in block.parameters())


def _find(parts: BlockAdapter, block: nn.Module) -> DenseBlock | None:
    return parts.dense(block) if parts.head_shape(block)[1] <= kernels.WIDEST else None


@dataclass(frozen=True)
class Known:
    """A block's matrices, cached; revalidated on each call.

    Attributes:
        modules: all modules inside the block; ``kinds`` are their classes and modes.
        children: the submodules of each.
        hooks: the hook dicts of all modules; empty, or the block would not be dense.
        weights: the parameter dicts of all modules; ``weight_kinds`` are the classes of the parameters.
        rates: dropout rates.
    """

    dense: DenseBlock
    modules: tuple[nn.Module, ...]
    kinds: list[tuple[type, bool]]
    children: list[tuple[dict[str, Any], tuple[Any, ...]]]
    hooks: tuple[dict[int, Any], ...]
    weights: tuple[dict[str, Any], ...]
    weight_kinds: list[type]
    rates: list[tuple[nn.Module, str, float]]

    @classmethod
    def of(cls, block: nn.Module, dense: DenseBlock) -> Known:
        """Return the cache entry of a block."""
        modules = tuple(part for part in block.modules() if part is not block)
        weights = tuple(part._parameters for part in modules if part._parameters)
        return cls(
            dense,
            modules,
            [(type(part), part.training) for part in modules],
            [(part._modules, tuple(part._modules.values())) for part in (block, *modules) if part._modules],
            tuple(hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)),
            weights,
            [type(weight) for part in weights for weight in part.values()],
            [
                (part, name, getattr(part, name))
                for part in modules
                for name in ("p", "drop_prob")
                if hasattr(part, name)
            ],
        )

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return (
            not any(self.hooks)
            and [(type(part), part.training) for part in self.modules] == self.kinds
            and [type(weight) for part in self.weights for weight in part.values()] == self.weight_kinds
            and all(tuple(there.values()) == before for there, before in self.children)
            and all(getattr(part, name) == rate for part, name, rate in self.rates)
        )


_known: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def dense_forward(
    dense: DenseBlock,
    x: Tensor,
    state: MergeState,
    r: int,
    size: Tensor | None,
    method: Method,
    read: Read | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, MergeState]:
    """Attend, reduce and feed.

    Args:
        r: number of tokens that the method's fused twin merges.
        size: sizes (B, N) by which attention counts keys.
        read: called with keys and values, which it must not keep.
        reduce: reduces the tokens of methods without a fused twin.
    """
    _, drop_hidden, drop_mlp = dense.drops
    learns = torch.is_grad_enabled()
    gamma, dtype = dense.gammas[1], work_dtype(x)
    # the product adds to the tokens in place where both have one dtype
    in_place = gamma is None and not drop_mlp and not learns and x.dtype == dtype == dense.fc2.weight.dtype
    pending_bias = dense.fc2.bias if in_place else None
    x, h, state = _attend_and_merge(dense, x.contiguous(), state, r, size, method, pending_bias, read, reduce)
    width = x.shape[2]
    if learns:
        hidden = F.gelu(dense.fc1(h), approximate=dense.gelu)
    else:
        hidden = _linear_gelu(dense.fc1, h.view(-1, width), dense.gelu)
    hidden = _apply(drop_hidden, hidden)
    if pending_bias is not None:
        return x.view(-1, width).addmm_(hidden, dense.fc2.weight.t()).view_as(x), state
    y = _apply(drop_mlp, dense.fc2(hidden).view_as(x))
    if not learns:
        return ops.add_scaled(x, y, gamma), state
    return (x + y if gamma is None else torch.addcmul(x, y, gamma)), state


def _attend_and_merge(
    dense: DenseBlock,
    x: Tensor,
    state: MergeState,
    r: int,
    size: Tensor | None,
    method: Method,
    pending_bias: Tensor | None,
    read: Read | None,
    reduce: Reduce | None,
) -> tuple[Tensor, Tensor, MergeState]:
    """Return the tokens after attention and the merge, plus ``pending_bias``, and their LayerNorm for the MLP."""
    attended = _attend(dense, x, state, r, size, method, read)
    x, step = attended.x, attended.step
    y = _apply(dense.drops[0], dense.proj(attended.y))
    attended.join()
    gamma, norm2 = dense.gammas[0], dense.norm2
    norm = norm2.weight, norm2.bias, norm2.eps, work_dtype(x)
    if reduce is not None:
        x = x + y if gamma is None else torch.addcmul(x, y, gamma)
        return _merge_reduction(norm, x, state, reduce(x, attended.h, attended.projected), method, pending_bias)
    if step is None:
        x, h = ops.add_norm(x, y, gamma, *norm, pending_bias)
        return x, h, state.next_layer(x)
    x, size, log2_size, h = ops.merge_norm(x, y, gamma, state.size, step.member, step.start, *norm, pending_bias)
    return x, h, state.after(step, size, log2_size).next_layer(x)


def _merge_reduction(
    norm: tuple[Tensor, Tensor, float, torch.dtype],
    x: Tensor,
    state: MergeState,
    reduction: Reduction | None,
    method: Method,
    pending_bias: Tensor | None,
) -> tuple[Tensor, Tensor, MergeState]:
    """Return reduced tokens plus ``pending_bias``, and their LayerNorm for the MLP; means take one kernel."""
    if reduction is None or reduction.soft is not None or not method.averages or _learns(reduction.weight):
        if reduction is not None:
            x, state = state.apply(x, reduction, method)
        x, h = ops.norm_residual(x.contiguous(), *norm)
        return (x if pending_bias is None else x + pending_bias), h, state.next_layer(x)
    step = kernels.with_members(reduction.assignment)
    weight = state.size if reduction.weight is None else reduction.weight
    weight = None if weight is None else weight.float().contiguous()
    state = state.with_entries(reduction)
    x, total, log2_size, h = ops.merge_norm(x, None, None, weight, step.member, step.start, *norm, pending_bias)
    if reduction.size is None:
        state = state.after(step, total, log2_size, reduction.weight)
    else:
        state = state.after(step, step.merge_sizes(reduction.size), None, reduction.weight)
    return x, h, state.next_layer(x)


def _learns(weight: Tensor | None) -> bool:
    return weight is not None and weight.requires_grad


class Attended(NamedTuple):
    """Tokens, their LayerNorm and projections, what attention returns for them, and the fused matching if any.

    ``join`` waits for the matching.
    """

    x: Tensor
    h: Tensor
    projected: Projections
    y: Tensor
    step: KernelAssignment | None
    join: Callable[[], None]


def _attend(
    dense: DenseBlock, x: Tensor, state: MergeState, r: int, size: Tensor | None, method: Method, read: Read | None
) -> Attended:
    """Attend, and match concurrently, since the fused matching needs no attention."""
    x, h, packed, q, k, v = _project(dense, x)
    with kernels.side_stream(k) as join:
        assert isinstance(state.protected, int)
        step = kernels.match(_matched(method, state, x, h, (q, k, v)), r, state.protected) if r else None
    if read is not None:
        read(k, v)
    log2_size = state.log2_size if size is state.size else None
    if packed is not None and packed.requires_grad:
        y = kernels.packed_attention(packed, dense.heads, size, log2_size, dense.scale)
    else:
        y = kernels.attention(q, k, v, size, log2_size, scale=dense.scale)
    return Attended(x, h, (q, k, v), y, step, join)


def _matched(method: Method, state: MergeState, x: Tensor, h: Tensor, projected: Projections) -> Tensor:
    """Return the features (B, H, N, d) that the matching compares: keys, or the method's own."""
    if method.twin == "tome":
        return projected[1].detach()
    assert isinstance(state.protected, int)
    context = Context(state.layer, (1, 1, x.shape[1]), x, state.size, state.protected)
    context.norm, context.project = (lambda: h), (lambda: projected)
    return method.matched(context).detach()


def _project(dense: DenseBlock, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Return tokens, normed tokens, and queries, keys and values: packed where one layer computes them, and apart."""
    norm, heads = dense.norm1, dense.heads
    x, h = ops.norm_residual(x, norm.weight, norm.bias, norm.eps, work_dtype(x))
    if len(dense.qkv) == 1:
        packed = dense.qkv[0](h)
        return x, h, packed, *ops.unpack(packed, heads)
    q, k, v = (linear(h).unflatten(-1, (heads, -1)).transpose(1, 2) for linear in dense.qkv)
    return x, h, None, q, k, v


def _apply(drops: tuple[nn.Module, ...], y: Tensor) -> Tensor:
    for drop in drops:
        y = drop(y)
    return y


def _linear_gelu(linear: nn.Linear, h: Tensor, approximate: str) -> Tensor:
    """Compute a linear layer and GELU as one matrix product with an epilogue, which autocast does not know.

    The epilogue is the tanh form of GELU, within 5·10⁻⁴ of the exact one: below the resolution of bfloat16 around one.
    float16 resolves more, and gets the exact form.
    """
    if approximate == "tanh" or h.dtype == torch.bfloat16:
        bias, weight = linear.bias.to(h.dtype), linear.weight.to(h.dtype)
        return torch._addmm_activation(bias, h, weight.t(), use_gelu=True)
    return F.gelu(linear(h), approximate=approximate)


class PatchProduct:
    """Mixin in front of a convolution whose stride equals its kernel; a matrix product in half precision on a GPU."""

    def forward(self: Any, x: Tensor) -> Tensor:
        dtype = work_dtype(x)
        casts = torch.is_autocast_enabled(x.device.type) or x.dtype == self.weight.dtype
        if dtype not in HALF or not kernels.usable(x) or not casts:
            return super().forward(x)  # type: ignore[misc]
        x = x.to(dtype)
        high, wide = self.kernel_size
        batch, channels, height, width = x.shape
        rows, columns = height // high, width // wide
        cells = x[..., : rows * high, : columns * wide].reshape(batch, channels, rows, high, columns, wide)
        flat = cells.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, channels * high * wide)
        tokens = F.linear(flat, self.weight.flatten(1), self.bias)
        return tokens.view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def patch_convolutions(parts: list[nn.Module]) -> list[nn.Module]:
    """Return the convolutions among these modules that embed non-overlapping patches."""
    return [part for part in parts if type(part) is nn.Conv2d and _cuts_patches(part)]


def _cuts_patches(conv: nn.Conv2d) -> bool:
    return (
        tuple(conv.stride) == tuple(conv.kernel_size)
        and not any(conv.padding if isinstance(conv.padding, tuple) else (1,))
        and set(conv.dilation) == {1}
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )
