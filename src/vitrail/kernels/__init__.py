"""Fused Triton kernels for the functions of ``vitrail.merging``, and the choice between the two.

    attention                     proportional attention            merging.proportional_attention
    received_attention            the attention that each token receives
    reduce                        a method, or its fused twin       merging.Method.reduce
    FusedMatcher                  the steps of a matching           merging.bipartite.Matcher
    KernelAssignment.merge_all    means of groups                   merging.Assignment.merge_all
    rotate                        rotary position                   adapters.position.rotate

The kernels run on CUDA devices where Triton is installed; every other device and dtype uses the reference functions,
and so does everything inside ``with reference():``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels import ops
from vitrail.merging import Assignment, Context, Method, Reduction
from vitrail.merging.attention import key_bias, proportional_attention
from vitrail.merging.bipartite import Matcher, Order, Pairs, Protected
from vitrail.merging.method import check_reduction

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
"""Dtypes of tokens, and of index maps."""
_HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST = 128
"""Largest head width whose blocks fit the shared memory of a multiprocessor."""


class _Switch:
    forced = 0


_switch = _Switch()


@contextmanager
def reference() -> Iterator[None]:
    """Use the reference functions inside the ``with`` block, in all threads."""
    _switch.forced += 1
    try:
        yield
    finally:
        _switch.forced -= 1


def is_reference() -> bool:
    """Return whether the reference functions are forced now."""
    return _switch.forced > 0


def usable(x: Tensor) -> bool:
    """Return whether the kernels run on a tensor."""
    return x.is_cuda and x.dtype in _DTYPES and _HAS_TRITON and not _switch.forced


def describe() -> dict[str, Any]:
    """Return which implementation is used here, and why."""
    if _switch.forced:
        return {"kernels": "reference", "why": "forced by vitrail.kernels.reference()"}
    if not _HAS_TRITON:
        return {"kernels": "reference", "why": "Triton is not installed"}
    if not torch.cuda.is_available():
        return {"kernels": "reference", "why": "no CUDA device"}
    return {"kernels": "triton", "why": f"Triton on {torch.cuda.get_device_name()}"}


SIDE_STREAM_BATCH = 32
"""Largest batch whose matching runs concurrently with attention: a few images do not fill a GPU, many do."""

_side_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


@contextmanager
def side_stream(x: Tensor) -> Iterator[Callable[[], None]]:
    """Run the ``with`` block on a side stream once ``x`` is ready; yield a function that joins the streams.

    Only for small batches while a CUDA graph is captured: otherwise the extra launches cost more than they save. Every
    stream has its own side stream, which waits for it each time, so memory freed on either is never reused while the
    other still reads it.
    """
    if x.shape[0] > SIDE_STREAM_BATCH or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
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
    """Do nothing: there is no stream to join."""


@dataclass(frozen=True)
class KernelAssignment(Assignment):
    """An assignment that lists the members of each group, so that a kernel can merge them in one pass.

    Attributes:
        member: positions group by group (B, N), int32.
        start: where each group starts in ``member`` (B, length + 1), int32.
    """

    member: Tensor
    start: Tensor

    def merge_all(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return ops.merge(x, size, self.member, self.start)

    def merge(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        learns = weight is not None and weight.requires_grad
        if learns or x.shape[2] > MOST_CHANNELS or torch.compiler.is_compiling() or not usable(x):
            return super().merge(x, weight)
        weight = None if weight is None else weight.float().contiguous()
        merged: Tensor = ops.merge(x.expand(*self.target.shape, -1), weight, self.member, self.start)[0]
        return merged

    def best_members(self, rating: Tensor) -> Tensor:
        if rating.dtype != torch.float32 or torch.compiler.is_compiling() or not usable(rating):
            return super().best_members(rating)
        found: Tensor = ops.best_members(self.target, rating)
        return found

    def lengthened(self, length: int) -> KernelAssignment:
        empty = length - self.length
        start = F.pad(self.start, (0, empty), value=self.target.shape[1]) if empty else self.start
        return replace(self, length=length, start=start)


MOST_CHANNELS = 4096
"""Most channels of a token that one program merges."""


def with_members(assignment: Assignment) -> KernelAssignment:
    """Return any assignment with the members of its groups listed."""
    if isinstance(assignment, KernelAssignment):
        return assignment
    target, length = assignment.target, assignment.length
    if usable(target):
        return KernelAssignment(target, length, *ops.list_members(target, length))
    member = target.argsort(stable=True, dim=1).to(torch.int32)
    counts = torch.zeros(target.shape[0], length + 1, dtype=torch.int64, device=target.device)
    counts.scatter_add_(1, target + 1, torch.ones_like(target))
    return KernelAssignment(target, length, member, counts.cumsum(1).to(torch.int32))


def _by_first_member(assignment: Assignment) -> Assignment:
    """Return the same groups in the order of their first member."""
    if torch.compiler.is_compiling() or not usable(assignment.target):
        return assignment.by_first_member()
    first, length = ops.first_members(assignment.target), assignment.length
    target, member, start = ops.place(first, length, False, 0, None, None)
    return KernelAssignment(target, length, member, start)


class FusedPairs(Pairs):
    """The cosines of all pairs of tokens, computed where they are used and never written."""

    def __init__(self, metric: Tensor) -> None:
        self.metric = metric.detach()

    def affinity(self, margin: float, among: Tensor) -> Tensor:
        found: Tensor = ops.pairs(self.metric, among, float(margin))
        return found

    def nearest(self, among: Tensor) -> Tensor:
        found: Tensor = ops.pairs(self.metric, among, None)
        return found


class FusedMatcher(Matcher):
    """The steps of a matching as kernels, for tokens that these serve; the reference functions for others."""

    def match(
        self,
        metric: Tensor,
        r: int | Tensor,
        protected: Protected = 0,
        present: Tensor | None = None,
        penalty: Tensor | None = None,
    ) -> Assignment:
        if not usable(metric) or (isinstance(r, int) and r == 0):
            return super().match(metric, r, protected, present, penalty)
        features = metric.detach().unsqueeze(1)
        if penalty is None and present is None and isinstance(r, int) and isinstance(protected, int):
            return match(features, r, protected)
        penalty = None if penalty is None else penalty.float()
        first, mask = _split(protected)
        best, partner = ops.best(features, first, penalty, mask, present)
        return self.match_edges(best, partner, r, metric.shape[1], protected, present)

    def match_scores(
        self, scores: Tensor, r: int | Tensor, protected: Protected = 0, present: Tensor | None = None
    ) -> Assignment:
        if scores.dtype != torch.float32 or not usable(scores) or (isinstance(r, int) and r == 0):
            return super().match_scores(scores, r, protected, present)
        best, partner = ops.best_given(scores.detach())
        return self.match_edges(best, partner, r, scores.shape[1] + scores.shape[2], protected, present)

    def best_edges(self, metric: Tensor, protected: Protected, present: Tensor | None) -> tuple[Tensor, Tensor]:
        if not usable(metric):
            return super().best_edges(metric, protected, present)
        first, mask = _split(protected)
        best, partner = ops.best(metric.detach().unsqueeze(1), first, None, mask, present)
        return best, partner

    def pairs(self, metric: Tensor) -> Pairs:
        return FusedPairs(metric) if usable(metric) else super().pairs(metric)

    def place_groups(self, group: Tensor, mask: Tensor, present: Tensor | None, r: int | Tensor) -> Assignment:
        if not usable(group):
            return super().place_groups(group, mask, present, r)
        if isinstance(r, int) and present is None:
            length = group.shape[1] - r
        else:
            here = torch.full_like(group[:, 0], group.shape[1]) if present is None else present.sum(1)
            length = int((here - r).max())
        return KernelAssignment(*_placed(group.to(torch.int32), length, mask, present))

    def strongest_between(self, values: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
        parts = (values, sources, destinations)
        if any(part.dtype != torch.float32 or part.requires_grad or not usable(part) for part in parts):
            return super().strongest_between(*parts)
        found: Tensor = ops.strongest_between(*parts)
        return found

    def rank(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32 or not usable(values):
            return super().rank(values)
        found: Tensor = ops.ranks(values)
        return found

    def match_edges(
        self, best: Tensor, partner: Tensor, r: int | Tensor, length: int, protected: Protected, present: Tensor | None
    ) -> Assignment:
        """Merge the r best of these edges in each image; numbers per image are read back from the device once."""
        if best.dtype != torch.float32 or not usable(best):
            return super().match_edges(best, partner, r, length, protected, present)
        if isinstance(r, int) and present is not None:
            r = torch.full(best.shape[:1], r, dtype=torch.int64, device=best.device)
        amount = r if isinstance(r, Tensor) else None
        first, mask = _split(protected)
        count = r if isinstance(r, int) else 0
        group, kept = ops.settle(best, partner.to(torch.int32), count, amount, length, first, mask, present)
        left = length - count if amount is None else int(kept.max())
        return KernelAssignment(*_placed(group, left, protected, present))


def _split(protected: Protected) -> tuple[int, Tensor | None]:
    """Return the number of protected tokens in front, and the mask of protected tokens: 0 or None for the other."""
    return (protected, None) if isinstance(protected, int) else (0, protected)


def _placed(
    group: Tensor, length: int, protected: Protected, present: Tensor | None
) -> tuple[Tensor, int, Tensor, Tensor]:
    """Place groups in ToMe's order; return the fields of their assignment."""
    target, member, start = ops.place(group, length, True, *_split(protected), present)
    return target, length, member, start


FUSED = FusedMatcher()


TWINS = ("tome", "features")
"""Names of fused kernels (``Method.twin``): ToMe's matching by keys, or by ``Method.matched``."""


def match(features: Tensor, r: int, protected: int) -> KernelAssignment:
    """Match tokens as ToMe does, by the mean of their features (B, H, N, d) over H."""
    target, member, start = ops.match(features, r, protected)
    return KernelAssignment(target, features.shape[2] - r, member, start)


def reduce(method: Method, context: Context, r: int | Tensor, order: Order = "paper") -> Reduction | None:
    """Reduce the tokens of a block: by the method's fused twin where it runs, by the method itself otherwise.

    The method's own matching runs as kernels, too, where it calls ``context.match`` or ``context.matcher``.
    """
    protected = context.protected
    fused = method.twin in TWINS and order == "paper" and not context.padded and usable(context.x)
    if fused and r and isinstance(r, int) and isinstance(protected, int):
        features = (context.k if method.twin == "tome" else method.matched(context)).detach()
        if usable(features):
            return Reduction(match(features, r, protected))
    eager = usable(context.x) and not torch.compiler.is_compiling()
    if eager:
        context.kernels = FUSED
    reduction = method.reduce(context, r)
    check_reduction(method, reduction, context)
    if reduction is None:
        return None
    if not method.static and reduction.soft is None:
        reduction = replace(reduction, assignment=_pad(reduction.assignment, bucket_of(method, context.x)))
    if reduction.soft is None and (not method.places_groups or (order == "original" and not method.keeps_grid)):
        reduction = replace(reduction, assignment=_by_first_member(reduction.assignment))
    plain = reduction.weight is None and reduction.size is None and reduction.soft is None and method.averages
    if plain and eager:
        return replace(reduction, assignment=with_members(reduction.assignment))
    return reduction


BUCKET = 16
"""Multiple to which lengths that depend on the images are padded on CUDA devices."""


def bucket_of(method: Method, x: Tensor) -> int:
    """Return the multiple to which lengths of a method are padded on the device of ``x``."""
    return method.bucket or (BUCKET if x.is_cuda else 1)


def _pad(assignment: Assignment, multiple: int) -> Assignment:
    """Return the assignment with empty groups behind the others, up to a multiple or the length before."""
    length = -(-assignment.length // multiple) * multiple
    return assignment.lengthened(max(assignment.length, min(length, assignment.target.shape[1])))


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
    """Compute proportional attention (B, H, N, d) with sizes (B, N), differentiable in both; return (B, N, H·d)."""
    plain = mask is None and not causal and dropout == 0.0
    if size is not None and plain and q.shape[-1] <= WIDEST and not size.requires_grad and usable(q):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        log2_size = size.log2() if log2_size is None else log2_size
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return ops.attend_keep(q, k, v, log2_size, scale)[0]
        return ops.attend(q, k, v, log2_size, scale)
    out = proportional_attention(q, k, v, size, mask=mask, causal=causal, scale=scale, dropout=dropout)
    return out.transpose(1, 2).flatten(2)


def turns(x: Tensor, table: Tensor) -> bool:
    """Return whether ``ops.rotate`` turns queries or keys by a table; compilers fuse the reference by themselves."""
    return usable(x) and not table.requires_grad and not torch.compiler.is_compiling()


QUERIES_AT_ONCE = 256
"""Queries whose attention is computed at once by the reference, so that memory stays small."""


def received_attention(
    q: Tensor,
    k: Tensor,
    size: Tensor | None,
    presence: Tensor | None,
    scale: float,
    weigh: Callable[[Tensor, slice], Tensor] | None = None,
) -> Tensor:
    """Compute the mean attention that each token receives from all tokens present (B, H, N).

    Args:
        q: queries (B, H, N, d), and keys ``k`` likewise.
        size: sizes of the keys (B, N); None where all are 1.
        presence: 1 for tokens, 0 for padding (B, N); None where nothing is padded.
        weigh: turns scaled scores (B, H, Q, N) of some queries into weights, where that is more than a softmax with
            sizes.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    ones = torch.ones(q.shape[0], q.shape[2], dtype=work, device=q.device)
    present = ones if presence is None else presence
    share = present / present.sum(1, keepdim=True)
    if weigh is None and q.shape[-1] <= WIDEST and usable(q) and not (torch.is_grad_enabled() and q.requires_grad):
        bias = torch.zeros_like(ones) if size is None else size.float().log2()
        received: Tensor = ops.attention_received(q.detach(), k.detach(), bias, share.float(), scale)
        return received

    def weigh_by_size(scores: Tensor, rows: slice) -> Tensor:
        bias = key_bias(size, None, scores)
        return (scores if bias is None else scores + bias).softmax(-1)

    total: Tensor | float = 0.0
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        rows = slice(start, start + QUERIES_AT_ONCE)
        scores = (q[:, :, rows] * scale) @ k.transpose(-2, -1)
        weights = (weigh or weigh_by_size)(scores, rows)
        total = total + (weights * share[:, None, rows, None]).sum(2)
    assert isinstance(total, Tensor)
    return total


def packed_attention(
    qkv: Tensor, heads: int, size: Tensor | None, log2_size: Tensor | None, scale: float | None
) -> Tensor:
    """Compute proportional attention from packed queries, keys and values (B, N, 3·H·d); the gradient is packed too."""
    if size is None or not usable(qkv):
        return attention(*ops.unpack(qkv, heads), size, log2_size, scale=scale)
    scale = (qkv.shape[2] // (3 * heads)) ** -0.5 if scale is None else scale
    return ops.attend_packed(qkv, size.log2() if log2_size is None else log2_size, heads, scale)[0]
