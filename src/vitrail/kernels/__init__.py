"""Fast twins of the reference functions, and the choice between the two.

    attention    proportional attention                   merging.proportional_attention
    match        which tokens merge into which            merging.match
    KernelAssignment.merge_all    means of groups         merging.Assignment.merge_all

The kernels serve CUDA devices where Triton is installed; every other device and dtype gets the reference. Inside
``with reference():`` everything does.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.kernels import ops
from vitrail.merging import METHODS, Assignment, proportional_attention
from vitrail.merging.bipartite import Order, Protected

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST = 128
"""Widest head, in channels, whose blocks fit a multiprocessor's memory."""


class _Switch:
    forced = 0


_switch = _Switch()


@contextmanager
def reference() -> Iterator[None]:
    """Use the reference functions everywhere inside, in all threads."""
    _switch.forced += 1
    try:
        yield
    finally:
        _switch.forced -= 1


def usable(x: Tensor) -> bool:
    """Whether the kernels serve a tensor."""
    return x.is_cuda and x.dtype in _DTYPES and _HAS_TRITON and not _switch.forced


def describe() -> dict[str, Any]:
    """Say which functions are used here, and why."""
    if _switch.forced:
        return {"kernels": "reference", "why": "forced by vitrail.kernels.reference()"}
    if not _HAS_TRITON:
        return {"kernels": "reference", "why": "Triton is not installed"}
    if not torch.cuda.is_available():
        return {"kernels": "reference", "why": "no CUDA device"}
    return {"kernels": "triton", "why": f"Triton on {torch.cuda.get_device_name()}"}


BESIDE = 32
"""Largest batch whose matching runs beside attention: a few pictures do not fill a GPU, many do."""

_side_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


@contextmanager
def beside(x: Tensor) -> Iterator[Callable[[], None]]:
    """Run what is inside on a stream of its own, once ``x`` is there; the function given joins the streams again.

    For small batches while a CUDA graph is recorded: otherwise streams cost more time to launch than they save. Every
    stream has one beside it, which waits for it each time: so memory that is given back on either is never taken while
    the other still reads it.
    """
    if x.shape[0] > BESIDE or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        yield _nothing
        return
    main = torch.cuda.current_stream(x.device)
    if main not in _side_streams:
        _side_streams[main] = torch.cuda.Stream(x.device)
    side = _side_streams[main]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield functools.partial(main.wait_stream, side)


def _nothing() -> None:
    """Join nothing."""


@dataclass(frozen=True)
class KernelAssignment(Assignment):
    """An assignment that lists the members of each group, so that a kernel can merge them in one pass."""

    member: Tensor
    start: Tensor

    def merge_all(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return ops.merge(x, size, self.member, self.start)


FUSED = ("tome",)
"""Methods that the kernels know."""


def match(k: Tensor, r: int, protected: Protected = 0, order: Order = "paper", method: str = "tome") -> Assignment:
    """Match tokens by their keys (B, H, N, d), averaged over heads."""
    known = method in FUSED and isinstance(protected, int) and order == "paper"
    if r and known and k.shape[-1] <= WIDEST and usable(k):
        target, member, start = ops.match(k, r, protected)
        return KernelAssignment(target, k.shape[2] - r, member, start)
    metric = k.mean(1, dtype=torch.promote_types(k.dtype, torch.float32))
    return METHODS[method](metric, r, protected, order)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    log2_size: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend (B, H, N, d) in proportion to sizes (B, N); gives (B, N, H·d). Sizes may want gradients, too."""
    plain = mask is None and not causal and dropout == 0.0
    if size is not None and plain and q.shape[-1] <= WIDEST and not size.requires_grad and usable(q):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        log2_size = size.log2() if log2_size is None else log2_size
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return ops.attend_keep(q, k, v, log2_size, scale)[0]
        return ops.attend(q, k, v, log2_size, scale)
    out = proportional_attention(q, k, v, size, mask=mask, causal=causal, scale=scale, dropout=dropout)
    return out.transpose(1, 2).flatten(2)


def packed_attention(
    qkv: Tensor, heads: int, size: Tensor | None, log2_size: Tensor | None, scale: float | None
) -> Tensor:
    """Attend with queries, keys and values in one tensor (B, N, 3·H·d), for gradients that are one tensor, too."""
    if size is None or not usable(qkv):
        return attention(*ops.unpack(qkv, heads), size, log2_size, scale=scale)
    scale = (qkv.shape[2] // (3 * heads)) ** -0.5 if scale is None else scale
    return ops.attend_packed(qkv, size.log2() if log2_size is None else log2_size, heads, scale)[0]
