"""Each kernel against the reference functions in float64: on a GPU, or on a CPU with Triton's interpreter.

The output of a kernel is poisoned first and lies between guards, its input is surrounded by NaN, and on a GPU the
same input must give the same bits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import (
    Attention,
    AttentionBackward,
    Backward,
    Case,
    Edges,
    Groups,
    Matching,
    Merging,
    Norm,
    Outcome,
    Pairs,
    Received,
    Rotary,
    Sum,
)
from tests.kernels.guards import guarded, surrounded
from tests.kernels.structure import check_lists, check_places, shortfall
from vitrail.adapters.position import rotate
from vitrail.kernels import (
    triton_attention,
    triton_groups,
    triton_matching,
    triton_merging,
    triton_received,
    triton_rotary,
)
from vitrail.kernels import triton_attention_backward as triton_attention_back
from vitrail.merging import Assignment, match, proportional_attention
from vitrail.merging.bipartite import Pairs as ReferencePairs
from vitrail.merging.bipartite import (
    blocked_mask,
    match_scores,
    place_groups,
    protected_mask,
    rank,
    similarity,
    strongest_between,
)

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of an element, as a share of the largest element."""

MATCHING_LIMIT = 1e-5
"""Similarities that differ by less may be taken for each other."""


def run(case: Case, device: str = "cpu") -> Outcome:
    """Try a kernel on a case."""
    try:
        error, limit = CHECKS[type(case)](case, torch.device(device))
    except Exception as problem:
        return Outcome(case.topic, str(case), why=f"{type(problem).__name__}: {problem}"[:500])
    return Outcome(case.topic, str(case), error, limit)


def _check_attention(case: Attention, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    q, k, v = draw.heads(3, case.heads, case.length, case.width, case.layout)
    q *= case.sharp
    size = draw.sizes(case.length, case.padding)
    bias = size.log2() + case.shift
    scale = case.width**-0.5 if case.scale is None else case.scale
    with mock.patch.object(triton_attention, "WHOLE", 0 if case.stepped else triton_attention.WHOLE):
        (out,) = twice(lambda: triton_attention.launch(q, k, v, bias, scale)[:1], device)  # type: ignore[arg-type]
    exact = proportional_attention(q.double(), k.double(), v.double(), size.double(), scale=scale)
    # the error of a score grows with the score, and float32 alone is fine enough to show it
    factor = max(1.0, case.sharp) if q.dtype == torch.float32 else 1.0
    return largest_error((out, exact.transpose(1, 2).flatten(2))), factor * LIMITS[q.dtype]


def _check_received(case: Received, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    q, k = draw.heads(2, case.heads, case.length, case.width, case.layout)
    q *= case.sharp
    size = draw.sizes(case.length, case.padding)
    scale = case.width**-0.5 if case.scale is None else case.scale
    present = (size > 0).double()
    share = present / present.sum(1, keepdim=True)
    (out,) = twice(lambda: (triton_received.launch(q, k, size.log2() + case.shift, share.float(), scale),), device)
    scores = q.double() @ k.double().transpose(-2, -1) * scale + size.double().log()[:, None, None]
    exact = (scores.softmax(-1) * share[:, None, :, None]).sum(2)
    factor = max(1.0, case.sharp) if q.dtype == torch.float32 else 1.0
    return largest_error((out, exact)), factor * LIMITS[q.dtype]


def _check_attention_backward(case: AttentionBackward, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    q, k, v = draw.heads(3, case.heads, case.length, case.width, case.layout)
    q *= case.sharp
    size = draw.sizes(case.length, case.padding)
    bias = size.log2() + case.shift
    grad = draw.normal(case.batch, case.length, case.heads * case.width)
    scale = case.width**-0.5 if case.scale is None else case.scale
    with mock.patch.object(triton_attention, "WHOLE", 0 if case.stepped else triton_attention.WHOLE):
        out, sums = triton_attention.launch(q, k, v, bias, scale, keep=True)
    assert sums is not None

    def launch() -> Sequence[Tensor]:
        into = tuple(torch.empty_like(out).unflatten(-1, (case.heads, -1)).transpose(1, 2) for _ in range(3))
        triton_attention_back.launch(grad, (q, k, v), bias, out, sums, scale, into)  # type: ignore[arg-type]
        return into

    back = triton_attention_back
    splits, head, split = back._splits, back._blocks_head, back._blocks_split
    small = {
        "_splits": lambda *a: case.split or splits(*a),
        "_blocks_head": lambda *a: (16, 16) if case.blocks else head(*a),
        "_blocks_split": lambda *a: (back.Blocks(16, 16, 2),) * 2 if case.blocks else split(*a),
    }
    with mock.patch.multiple(back, **small):
        found = twice(launch, device)
    exact = [part.double().requires_grad_() for part in (q, k, v)]
    attended = proportional_attention(*exact, size.double(), scale=scale)
    attended.transpose(1, 2).flatten(2).backward(grad.double())
    factor = max(1.0, case.sharp) if q.dtype == torch.float32 else 1.0
    return largest_error(*((one, part.grad) for one, part in zip(found, exact, strict=True))), factor * LIMITS[q.dtype]  # type: ignore[arg-type]


def _check_matching(case: Matching, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    k = _keys(case, draw)
    with mock.patch.object(triton_matching, "WHOLE", 0 if case.stepped else triton_matching.WHOLE):
        target, member, start = twice(lambda: triton_matching.launch(k, case.merges, case.protected), device)
    metric = k.double().mean(1)
    exact = match(metric, case.merges, case.protected)
    assert target.dtype == torch.int64
    assert member.dtype == start.dtype == torch.int32
    assert start.shape == (case.batch, exact.length + 1)
    check_places(target, case.merges, case.protected)
    check_lists(target, member.long(), start.long())
    short, unclear = shortfall(metric, target, case.merges, case.protected, MATCHING_LIMIT)
    assert torch.equal(target[~unclear], exact.target[~unclear]), "other merges than the reference's"
    return short, MATCHING_LIMIT


def _check_edges(case: Edges, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    features = _keys(case, draw)
    penalty = draw.normal(case.batch, case.length).float().abs() if case.penalty else None
    present = draw.sizes(case.length, case.padding) > 0 if case.padding else None
    mask = (draw.normal(case.batch, case.length) > 0.5) if case.masked else None
    protected = case.protected if mask is None else mask
    amount = torch.arange(case.batch, device=device) * case.length // 3 if case.counts else None
    scores = similarity(features.double().mean(1), blocked_mask(protected, present, case.length, device))
    if penalty is not None:
        scores = scores - penalty[:, ::2].double().unsqueeze(2) - penalty[:, 1::2].double().unsqueeze(1)
    exact = match_scores(scores, case.merges if amount is None else amount, protected, present=present)
    first = 0 if mask is not None else case.protected

    def launch() -> Sequence[Tensor]:
        if case.given:
            best, partner = triton_matching.launch_best_given(scores.float())
        else:
            best, partner = triton_matching.launch_best(features, first, penalty, mask, present)
        count = case.merges if amount is None else 0
        group, kept = triton_groups.launch_settle(best, partner, count, amount, case.length, first, mask, present)
        left = exact.length if amount is None else int(kept.max())
        return triton_groups.launch_place(group, left, True, first, mask, present)

    target, member, start = twice(launch, device)
    assert start.shape == (case.batch, exact.length + 1), "another number of tokens than the reference's"
    _check_members(target, member, start)
    clear = ~_near_ties(scores)
    assert torch.equal(target[clear], exact.target[clear]), "other merges than the reference's"
    return 0.0, 0.0


def _check_pairs(case: Pairs, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    metric = _keys(case, draw)[:, 0]
    among = draw.normal(case.batch, case.length) > 0
    among[:, 0] = True
    (sums,) = twice(lambda: (triton_matching.launch_pairs(metric, among, case.margin),), device)
    exact = ReferencePairs(metric.double())
    (nearest,) = twice(lambda: (triton_matching.launch_pairs(metric, among, None),), device)
    scores = exact.cosine.masked_fill(~among.unsqueeze(1), -math.inf)
    clear = torch.ones_like(among)
    if case.length > 1:
        one, two = scores.topk(2, 2).values.unbind(2)
        clear = (one == two) | (one - two > MATCHING_LIMIT)
    assert torch.equal(nearest[clear], exact.nearest(among)[clear]), "another token is the nearest"
    return largest_error((sums, exact.affinity(case.margin, among))), LIMITS[torch.float32]


def _near_ties(scores: Tensor) -> Tensor:
    """Return the images (B,) in which rounding may decide between two scores that are near, but not equal."""
    best = scores.amax(2)
    near = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    if scores.shape[2] > 1:
        one, two = scores.topk(2, 2).values.unbind(2)
        near |= ((one - two > 0) & (one - two < MATCHING_LIMIT)).any(1)
    gaps = -best.sort(1, descending=True).values.diff(dim=1)
    return near | ((gaps > 0) & (gaps < MATCHING_LIMIT)).any(1)


def _check_members(target: Tensor, member: Tensor, start: Tensor) -> None:
    """Check that the members of each group are listed in their order."""
    expected = target.argsort(dim=1, stable=True)
    groups = torch.arange(start.shape[1], device=target.device)
    begins = (target.unsqueeze(1) < groups[:, None]).sum(2)
    assert torch.equal(member.long(), expected), "members are not listed group by group, in their order"
    assert torch.equal(start.long(), begins), "groups begin elsewhere"


def _check_groups(case: Groups, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    given = draw.groups(case.length, case.kept, crowded=False).assignment.target
    given = given.clamp(max=case.kept - 1)
    length = case.kept + case.spare
    member, start = twice(lambda: triton_groups.launch_list(given, length), device)
    _check_members(given, member, start)

    (first,) = twice(lambda: (triton_groups.launch_first(given),), device)
    assignment = Assignment(given, length)
    assert torch.equal(first.long(), assignment.first_members().gather(1, given)), "other first members"
    target, member, start = twice(lambda: triton_groups.launch_place(first, length, False), device)
    assert torch.equal(target, assignment.by_first_member().target), "groups stand in another order"
    _check_members(target, member, start)

    protected = min(2, case.length)
    leaders = torch.where(torch.arange(case.length, device=device) < protected, first * 0, first)
    leaders[:, :protected] = torch.arange(protected, device=device, dtype=torch.int32)
    leaders = leaders.gather(1, leaders.long())
    count = int((leaders == torch.arange(case.length, device=device)).sum(1).max())
    mask = protected_mask(protected, case.length, device)
    for given_mask in (None, mask):
        target, member, start = twice(
            partial(triton_groups.launch_place, leaders, count, True, protected, given_mask), device
        )
        exact = place_groups(leaders.long(), mask, None, case.length - count)
        assert torch.equal(target, exact.target), "groups stand in another order"
        _check_members(target, member, start)

    rating = torch.randint(0, 3, given.shape, generator=draw.source).float().to(device)
    (chosen,) = twice(lambda: (triton_groups.launch_best_members(given, rating),), device)
    assert torch.equal(chosen, assignment.best_members(rating).to(torch.uint8)), "other members have the best rating"

    # places in sixteenths, so that the points are exact in float32 and float64
    places = torch.randint(0, 16 * 7, (case.batch, case.length, 2), generator=draw.source).to(device) / 16
    heights = draw.normal(case.batch, 8, 6).float()
    lines = heights, places[:, ::2].float(), places[:, 1::2].float()
    (between,) = twice(lambda: (triton_groups.launch_strongest_between(*lines),), device)
    assert torch.equal(between, strongest_between(*lines)), "another value is the highest on a line"

    values = torch.randint(0, 6, given.shape, generator=draw.source).float().to(device)
    (ranks,) = twice(lambda: (triton_groups.launch_rank(values),), device)
    assert torch.equal(ranks, rank(values)), "other ranks"
    return 0.0, 0.0


def _check_merging(case: Merging, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    groups = draw.groups(case.length, case.kept, case.crowded, case.padding)
    x, y, gamma, add, norm = _tokens(case, draw)
    size = draw.sizes(case.length, case.padding) if case.sizes else None
    lists = triton_merging.Groups(size, groups.member, groups.start)
    out, sizes, logs, *normed = twice(
        lambda: tuple(t for t in triton_merging.launch(x, lists, y, gamma, norm, add) if t is not None), device
    )
    ones = torch.ones(case.batch, case.length, dtype=torch.float64, device=device)
    before = ones if size is None else size.double()
    exact = groups.assignment.merge(_summed(x, y, gamma), before)
    exact_sizes = groups.assignment.merge_sizes(before)
    assert torch.equal(sizes.double(), exact_sizes), "sizes are wrong"
    exact_logs = exact_sizes.log2()
    near = (logs.double() == exact_logs) | ((logs.double() - exact_logs).abs() < 1e-5)
    assert bool(near.all()), "log₂ of the sizes is wrong"
    if y is None and add is None:
        alone = (groups.start.diff(dim=1) == 1) & (exact_sizes > 0)
        first = groups.member.long().gather(1, groups.start[:, :-1].long().clamp(max=case.length - 1))
        assert torch.equal(out[alone], x.gather(1, first[..., None].expand(out.shape))[alone]), "not copied exactly"
    assert (norm is not None) == bool(normed)
    return _error_of_tokens(out, normed, exact, add, norm)


def _check_norm(case: Norm, device: torch.device) -> tuple[float, float]:
    x, y, gamma, add, norm = _tokens(case, Draw(case, device))
    assert norm is not None
    out, normed = twice(lambda: triton_merging.launch_norm(x, norm, y, gamma, add), device)
    return _error_of_tokens(out, [normed], _summed(x, y, gamma), add, norm)


def _check_sum(case: Sum, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    shape = (1, case.batch, case.length, case.channels)
    x, y = (surrounded(draw.normal(*shape).to(dtype), 0)[0] for dtype in (draw.dtype, _branch(case, draw)))
    gamma = surrounded(draw.normal(case.channels), 0) if case.gamma else None
    (out,) = twice(lambda: (triton_merging.launch_sum(x, y, gamma),), device)
    return largest_error((out, _summed(x, y, gamma))), LIMITS[x.dtype]


def _check_backward(case: Backward, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    kept = case.length if case.kept is None else case.kept
    groups = draw.groups(case.length, kept, crowded=False, empty=case.padding)
    assignment = Assignment(torch.arange(case.length, device=device).expand(case.batch, -1), case.length)
    lists = None
    size = draw.sizes(case.length, case.padding) if case.sizes else None
    if case.kept is not None:
        assignment, lists = groups.assignment, triton_merging.Groups(size, groups.member, groups.start)
    branch = _branch(case, draw)
    grad, grad_norm = (draw.normal(case.batch, kept, case.channels) for _ in range(2))
    grad_norm = grad_norm.to(branch)
    if case.strided:
        grad = draw.normal(case.batch, case.channels, kept).transpose(1, 2)
    ones = torch.ones(case.batch, case.length, device=device)
    merged = assignment.merge_sizes(ones if size is None else size)

    x, y = (draw.normal(case.batch, case.length, case.channels) for _ in range(2))
    y = y.to(branch)
    gamma, weight, bias = (draw.normal(case.channels) for _ in range(3))
    exact = {
        name: value.double().requires_grad_()
        for name, value in (("x", x), ("y", y), ("gamma", gamma), ("weight", weight), ("bias", bias))
    }
    scaled = exact["y"] * exact["gamma"] if case.gamma else exact["y"]
    token = assignment.merge(exact["x"] + scaled, None if size is None else size.double())
    loss = (token * grad.double()).sum() if case.tokens else token.sum() * 0
    if case.norm:
        normed = F.layer_norm(token, token.shape[-1:], exact["weight"], exact["bias"], 1e-6)
        loss = loss + (normed * grad_norm.double()).sum()
    loss.backward()

    short = token.detach().to(x.dtype)
    back = triton_merging.NormBack(grad_norm, short, weight, 1e-6) if case.norm else None

    def launch() -> Sequence[Tensor]:
        found = triton_merging.launch_backward(
            grad if case.tokens else None, back, lists, merged, y if case.gamma else None,
            gamma if case.gamma else None, branch,
        )  # fmt: skip
        return [found.x, found.y, *(() if found.vectors is None else found.vectors)]

    with mock.patch.object(triton_merging, "PROGRAMS", 5):
        found = twice(launch, device)
    names = ["x", "y", *(["weight", "bias"] if case.norm else []), *(["gamma"] if case.gamma else [])]
    assert found[1].dtype == branch
    pairs = [(value, exact[name].grad) for name, value in zip(names, found, strict=True)]
    return _worst(*pairs)  # type: ignore[arg-type]


def _check_rotary(case: Rotary, device: torch.device) -> tuple[float, float]:
    draw = Draw(case, device)
    (x,) = draw.heads(1, case.heads, case.length, case.width, case.layout)
    shape = [1 if axis in case.shared else size for axis, size in (("images", case.batch), ("heads", case.heads))]
    pairs = draw.normal(*shape, case.length - case.front, case.width // 2).float()
    angle = pairs.repeat_interleave(2, -1) if case.interleaved else torch.cat([pairs, pairs], -1)
    table = torch.cat([angle.sin(), angle.cos()], -1)
    exact = x.double().requires_grad_()
    turned = rotate(exact, table.double(), interleaved=case.interleaved)
    (found,) = twice(lambda: (triton_rotary.launch(x, table, case.interleaved, False).transpose(1, 2),), device)
    grad = draw.laid_out(draw.normal(1, *x.shape), case.layout)[0]
    (back,) = twice(lambda: (triton_rotary.launch(grad, table, case.interleaved, True).transpose(1, 2),), device)
    turned.backward(grad.double())
    assert exact.grad is not None
    return largest_error((found.transpose(1, 2), turned.detach()), (back.transpose(1, 2), exact.grad)), LIMITS[x.dtype]


CHECKS: dict[type[Case], Callable[[Any, torch.device], tuple[float, float]]] = {
    Attention: _check_attention,
    AttentionBackward: _check_attention_backward,
    Received: _check_received,
    Matching: _check_matching,
    Edges: _check_edges,
    Pairs: _check_pairs,
    Groups: _check_groups,
    Merging: _check_merging,
    Norm: _check_norm,
    Sum: _check_sum,
    Backward: _check_backward,
    Rotary: _check_rotary,
}


def twice(launch: Callable[[], Sequence[Tensor]], device: torch.device) -> Sequence[Tensor]:
    """Run into poisoned memory; on a GPU once more, for the same bits."""
    with guarded():
        found = launch()
    if device.type == "cuda":
        with guarded():
            again = launch()
        # poison that is left over is not equal to itself and found by the comparison with the reference
        for one, two in zip(found, again, strict=True):
            assert torch.equal(one.nan_to_num(), two.nan_to_num()), "the same input gave other bits"
    return found


def largest_error(*pairs: tuple[Tensor, Tensor]) -> float:
    """Return the largest error relative to the largest value, unless that is zero; NaN if any element is NaN."""
    errors = []
    for found, exact in pairs:
        assert found.shape == exact.shape
        largest = exact.abs().max().item()
        errors.append((found.double() - exact).abs().max().item() / (largest if largest > 1e-12 else 1.0))
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


@dataclass(frozen=True)
class Lists:
    """An assignment that lists the members of its groups."""

    assignment: Assignment
    member: Tensor
    start: Tensor


class Draw:
    """Random inputs, the same on every device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.source = torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed values in the case's dtype."""
        return torch.randn(shape, generator=self.source).to(self.device, self.dtype)

    def sizes(self, length: int, padding: int = 0) -> Tensor:
        """Sizes (B, N): small ones, and a few large; 0 for padding at the end."""
        size = torch.randint(1, 5, (self.case.batch, length), generator=self.source)
        size[torch.rand(size.shape, generator=self.source) < 0.1] *= 100
        size[:, length - padding // 2 :] = 0
        size[0, length - padding :] = 0
        return size.float().to(self.device)

    def heads(self, parts: int, heads: int, length: int, width: int, layout: str) -> list[Tensor]:
        """Return parts (B, H, N, D) laid out in memory as in a model, with NaN around their tokens."""
        return self.laid_out(self.normal(parts, self.case.batch, heads, length, width), layout)

    def laid_out(self, values: Tensor, layout: str) -> list[Tensor]:
        """Lay parts (P, B, H, N, D) out in memory."""
        # the axes as they lie in memory, and where the tokens are among them
        order, tokens = {
            "packed": ((1, 3, 0, 2, 4), 1),
            "separate": ((0, 1, 3, 2, 4), 2),
            "heads": ((0, 1, 2, 3, 4), 3),
            "channels": ((0, 1, 2, 4, 3), 4),
        }[layout]
        back = [order.index(axis) for axis in range(5)]
        return list(surrounded(values.permute(order).contiguous(), tokens).permute(back).unbind(0))

    def groups(self, length: int, kept: int, crowded: bool, empty: int = 0) -> Lists:
        """Return random groups in random order; the last ``empty`` groups of the first image have no members."""
        targets = []
        for image in range(self.case.batch):
            filled = kept if image else kept - empty
            more = torch.randint(0, filled, (length - filled,), generator=self.source)
            if crowded:
                more[torch.rand(more.shape, generator=self.source) < 0.8] = filled // 2
            shuffled = torch.randperm(length, generator=self.source)
            targets.append(torch.cat([torch.arange(filled), more])[shuffled])
        target = torch.stack(targets)
        member = target.argsort(dim=1, stable=True).int()
        counts = torch.zeros(len(target), kept, dtype=torch.int64).scatter_add(1, target, torch.ones_like(target))
        start = F.pad(counts.cumsum(1), (1, 0)).int()
        return Lists(Assignment(target.to(self.device), kept), member.to(self.device), start.to(self.device))


def _keys(case: Matching | Pairs, draw: Draw) -> Tensor:
    shape = (case.batch, case.heads, case.length, case.width)
    if case.keys in ("lattice", "equal"):
        # four channels of ±1: unit vectors are exact, similarities multiples of ¼, and a zero vector here and there
        one = torch.zeros(case.batch, case.length, case.width)
        channels = torch.rand(one.shape, generator=draw.source).argsort(-1)[..., :4]
        signs = 2.0 * torch.randint(0, 2, channels.shape, generator=draw.source) - 1
        one.scatter_(2, channels, signs)
        one[torch.rand(one.shape[:2], generator=draw.source) < 0.1] = 0
        one = one if case.keys == "lattice" else one[:, :1].expand_as(one)
        keys = one.unsqueeze(1).expand(shape).to(draw.device, draw.dtype)
    else:
        keys = draw.normal(*shape)
    if case.keys == "crowd":
        wanted = case.length - 1 - case.length % 2
        keys[:, :, ::2] = 0.1 * keys[:, :, ::2] + keys[:, :, wanted : wanted + 1]
    if case.keys == "broken":
        keys[0, :, case.length // 2] = math.nan
        keys[0, 0, case.length - 1, 0] = math.nan
        keys[-1, :, case.length - 2, 1] = math.inf
    return draw.laid_out(keys.unsqueeze(0), case.layout)[0]


def _tokens(
    case: Merging | Norm, draw: Draw
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, triton_merging.Norm | None]:
    shape = (case.batch, case.length, case.channels)
    x = surrounded(draw.normal(1, *shape), 0)[0]
    branch = _branch(case, draw)
    y = surrounded(draw.normal(1, *shape).to(branch), 0)[0] if case.y else None
    gamma, add, weight, bias = (surrounded(draw.normal(case.channels), 0) for _ in range(4))
    wants_norm = isinstance(case, Norm) or case.norm
    norm = triton_merging.Norm(weight, bias, 1e-6, branch) if wants_norm else None
    return x, y, gamma if case.gamma else None, add if case.add else None, norm


def _summed(x: Tensor, y: Tensor | None, gamma: Tensor | None) -> Tensor:
    if y is None:
        return x.double()
    return x.double() + (y.double() if gamma is None else gamma.double() * y.double())


def _error_of_tokens(
    out: Tensor, normed: Sequence[Tensor], exact: Tensor, add: Tensor | None, norm: triton_merging.Norm | None
) -> tuple[float, float]:
    pairs = [(out, exact if add is None else exact + add.double())]
    if norm is not None:
        weights = norm.weight.double(), norm.bias.double()
        assert normed[0].dtype == norm.dtype
        pairs.append((normed[0], F.layer_norm(exact, exact.shape[-1:], *weights, norm.eps)))
    return _worst(*pairs)


def _worst(*pairs: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the error nearest to the limit of its dtype, or above it, with that limit."""
    errors = [(largest_error(pair), LIMITS[pair[0].dtype]) for pair in pairs]
    return max(errors, key=lambda found: math.inf if math.isnan(found[0]) else found[0] / found[1])


def _branch(case: Merging | Norm | Sum | Backward, draw: Draw) -> torch.dtype:
    """Return the dtype of a case's branch and of its LayerNorm's result."""
    dtype: torch.dtype = getattr(torch, case.branch or case.dtype)
    return dtype
