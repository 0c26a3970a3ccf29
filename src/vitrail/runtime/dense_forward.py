"""The dense path: blocks of plain LayerNorms and sums, and patch embeddings, in half precision on a GPU.

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
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, DenseBlock, DenseMlp, repeat_heads
from vitrail.kernels import KernelAssignment, ops
from vitrail.merging import Context, MergeState, Method, Reduction
from vitrail.merging.method import Projections
from vitrail.runtime.plan import Plan

Read = Callable[[Tensor, Tensor], None]
Rotate = Callable[[Projections], tuple[Tensor, Tensor]]
Norm = tuple[Tensor, Tensor, float, torch.dtype]
"""Weight, bias and epsilon of a LayerNorm, and the dtype of its result."""

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
    """Return the form of a block that kernels compute; None where there is none, or they do not run here."""
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
    """Return the form of a block, cached where its weights last."""
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
    """The form of a block, cached; revalidated on each call, by comparisons that run in C.

    Attributes:
        modules: all modules inside the block; ``modes`` are their classes and whether they train.
        children: the dicts of submodules, and ``inside`` all that they hold.
        hooks: the hook dicts of all modules; empty, or the block is not cached.
        weights: the parameter dicts of all modules, and ``kinds`` the classes of what they hold.
        scales: where the layer scales are kept: dict, name, parameter.
        rates: dropout rates of modules that train.
    """

    dense: DenseBlock
    modules: tuple[nn.Module, ...]
    modes: list[Any]
    children: tuple[dict[str, Any], ...]
    inside: list[Any]
    hooks: tuple[dict[int, Any], ...]
    weights: tuple[dict[str, Any], ...]
    kinds: list[type]
    scales: tuple[tuple[dict[str, Any], str, Tensor], ...]
    rates: tuple[tuple[nn.Module, str, float], ...]

    @classmethod
    def of(cls, block: nn.Module, dense: DenseBlock) -> Known:
        """Return the cache entry of a block."""
        modules = tuple(part for part in block.modules() if part is not block)
        children = tuple(part._modules for part in (block, *modules) if part._modules)
        weights = tuple(part._parameters for part in (block, *modules) if part._parameters)
        return cls(
            dense,
            modules,
            list(map(_mode, modules)),
            children,
            _all_values(children),
            tuple(hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)),
            weights,
            list(map(type, _all_values(weights))),
            tuple(
                (there, name, weight)
                for there in weights
                for name, weight in there.items()
                if weight is not None and any(weight is gamma for gamma in dense.gammas)
            ),
            tuple(
                (part, name, getattr(part, name))
                for part in modules
                for name in ("p", "drop_prob")
                if part.training and hasattr(part, name)
            ),
        )

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return (
            not any(self.hooks)
            and list(map(_mode, self.modules)) == self.modes
            and _all_values(self.children) == self.inside
            and list(map(type, _all_values(self.weights))) == self.kinds
            and all(there.get(name) is scale for there, name, scale in self.scales)
            and all(getattr(part, name) == rate for part, name, rate in self.rates)
        )


_mode = attrgetter("__class__", "training")


def _all_values(dicts: tuple[dict[str, Any], ...]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


_known: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


class Dense(NamedTuple):
    """A block that fused kernels compute: its adapter, its form, and the dtype of its matrix products."""

    parts: BlockAdapter
    block: nn.Module
    form: DenseBlock
    dtype: torch.dtype

    def norm(self, norm: nn.LayerNorm) -> Norm:
        """Return a LayerNorm as the kernels take it."""
        return norm.weight, norm.bias, norm.eps, self.dtype


def dense_forward(
    parts: BlockAdapter,
    block: nn.Module,
    form: DenseBlock,
    x: Tensor,
    state: MergeState,
    r: int,
    size: Tensor | None,
    method: Method,
    rotate: Rotate | None = None,
    read: Read | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, MergeState]:
    """Attend, reduce and feed.

    Args:
        form: the block in the form that kernels compute; what it leaves out runs by the adapter.
        r: number of tokens that the method's fused twin merges.
        size: sizes (B, N) by which attention counts keys.
        rotate: turns queries and keys by their position.
        read: called with keys and values, which it must not keep.
        reduce: reduces the tokens of methods without a fused twin.
    """
    dense = Dense(parts, block, form, work_dtype(x))
    mlp, gamma, drops = form.mlp, form.gammas[1], form.drops[1]
    learns = torch.is_grad_enabled()
    # the last product adds to the tokens in place, where both have one dtype
    in_place = (
        mlp is not None
        and gamma is None
        and not (learns or drops or mlp.drops[1])
        and x.dtype == dense.dtype == mlp.fc2.weight.dtype
    )
    pending_bias = mlp.fc2.bias if in_place and mlp is not None else None
    x, h, state = _attend_and_merge(dense, x.contiguous(), state, r, size, method, pending_bias, rotate, read, reduce)
    if mlp is None:
        y = parts.feed(block, h)
    else:
        hidden = _apply(mlp.drops[0], _hidden(mlp, h, learns))
        if in_place:
            x.view(-1, x.shape[2]).addmm_(hidden, mlp.fc2.weight.t())
            return x, state
        y = _apply(mlp.drops[1], mlp.fc2(hidden).view_as(x))
    y = _apply(drops, y)
    if not learns:
        return ops.add_scaled(x, y.contiguous(), gamma), state
    return (x + y if gamma is None else torch.addcmul(x, y, gamma)), state


def _attend_and_merge(
    dense: Dense,
    x: Tensor,
    state: MergeState,
    r: int,
    size: Tensor | None,
    method: Method,
    pending_bias: Tensor | None,
    rotate: Rotate | None,
    read: Read | None,
    reduce: Reduce | None,
) -> tuple[Tensor, Tensor, MergeState]:
    """Return the tokens after attention and the merge, plus ``pending_bias``, and their LayerNorm for the MLP."""
    form = dense.form
    attended = _attend(dense, x, state, r, size, method, rotate, read)
    x, step = attended.x, attended.step
    ends = partial(dense.parts.attend_output, dense.block, h=attended.h) if form.proj is None else form.proj
    y = _apply(form.drops[0], ends(attended.y)).contiguous()
    attended.join()
    gamma, norm = form.gammas[0], dense.norm(form.norm2)
    if reduce is not None:
        x = x + y if gamma is None else torch.addcmul(x, y, gamma)
        return _merge_reduction(norm, x, state, reduce(x, attended.h, attended.projected), method, pending_bias)
    if step is None:
        x, h = ops.add_norm(x, y, gamma, *norm, pending_bias)
        return x, h, state.next_layer(x)
    x, size, log2_size, h = ops.merge_norm(x, y, gamma, state.size, step.member, step.start, *norm, pending_bias)
    return x, h, state.after(step, size, log2_size).next_layer(x)


def _merge_reduction(
    norm: Norm,
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
    dense: Dense,
    x: Tensor,
    state: MergeState,
    r: int,
    size: Tensor | None,
    method: Method,
    rotate: Rotate | None,
    read: Read | None,
) -> Attended:
    """Attend, and match concurrently, since the fused matching needs no attention."""
    x, h, packed, q, k, v = _project(dense, x)
    with kernels.side_stream(k) as join:
        assert isinstance(state.protected, int)
        step = kernels.match(_matched(method, state, x, h, (q, k, v), rotate), r, state.protected) if r else None
    projected = q, k, v
    if rotate is not None:
        q, k = rotate(projected)
    k, v = repeat_heads(q, k, v)
    if read is not None:
        read(k, v)
    log2_size = state.log2_size if size is state.size else None
    if packed is not None and packed.requires_grad and rotate is None:
        y = kernels.packed_attention(packed, dense.form.heads, size, log2_size, dense.form.scale)
    else:
        y = kernels.attention(q, k, v, size, log2_size, scale=dense.form.scale)
    return Attended(x, h, projected, y, step, join)


def _matched(
    method: Method, state: MergeState, x: Tensor, h: Tensor, projected: Projections, rotate: Rotate | None
) -> Tensor:
    """Return the features (B, H, N, d) that the matching compares: keys, or the method's own."""
    if method.twin == "tome":
        return projected[1].detach()
    assert isinstance(state.protected, int)
    context = Context(state.layer, (1, 1, x.shape[1]), x, state.size, state.protected)
    context.norm, context.project, context.rotate = (lambda: h), (lambda: projected), rotate
    return method.matched(context).detach()


def _project(dense: Dense, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Return tokens, normed tokens, and queries, keys and values: packed where one layer computes them, and apart."""
    form = dense.form
    x, h = ops.norm_residual(x, *dense.norm(form.norm1))
    if form.qkv is None:
        return x, h, None, *dense.parts.qkv(dense.block, h)
    if len(form.qkv) == 1:
        packed = form.qkv[0](h)
        return x, h, packed, *ops.unpack(packed, form.heads)
    width = dense.parts.head_shape(dense.block)[1]
    q, k, v = (linear(h).unflatten(-1, (-1, width)).transpose(1, 2) for linear in form.qkv)
    return x, h, None, q, k, v


def _apply(drops: tuple[nn.Module, ...], y: Tensor) -> Tensor:
    for drop in drops:
        y = drop(y)
    return y


def _hidden(mlp: DenseMlp, h: Tensor, learns: bool) -> Tensor:
    """Return the first half of an MLP: for inference one matrix product with an epilogue, which autocast does not know.

    The epilogue is the tanh form of GELU, within 5·10⁻⁴ of the exact one: below the resolution of bfloat16 around one.
    float16 resolves more, and gets the exact form.
    """
    fc1 = mlp.fc1
    if learns or not (mlp.gelu == "tanh" or h.dtype == torch.bfloat16):
        return F.gelu(fc1(h), approximate=mlp.gelu).flatten(0, 1)
    bias, weight = fc1.bias.to(h.dtype), fc1.weight.to(h.dtype)
    return torch._addmm_activation(bias, h.flatten(0, 1), weight.t(), use_gelu=True)


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
