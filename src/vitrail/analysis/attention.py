"""Attention: maps by token and head, rollout, mass between roles, overlap and spread of maps.

Attention is given as rows (B, H, Q, N): for each image and head, the softmax of each of Q query tokens over all N
tokens. ``queries`` are the positions of the query tokens; by default, Q rows are those of all special tokens, or of
all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail._arguments import checked, fitting
from vitrail.analysis._inputs import at_least_float32, check_finite, check_shape, chunks, map_chunks
from vitrail.analysis.norms.prominence import prominence
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import TokenLayout, span_names

Head = Literal["mean", "max", "min"]
HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1, dtype=torch.promote_types(x.dtype, torch.float32)),
    "max": lambda x: at_least_float32(x.amax(1)),
    "min": lambda x: at_least_float32(x.amin(1)),
}


@fitting
@torch.no_grad()
def token_maps(attention: Tensor, layout: TokenLayout, *, normalize: bool = True) -> Tensor:
    """Return the attention of each row to the patches, on their grid: (B, H, Q, N) to (B, H, Q, t, h, w).

    Normalized maps sum to one over the patches. Rows without attention to any patch stay zero.
    """
    _check_rows(attention, layout)
    maps = at_least_float32(attention[..., layout.patches])
    if normalize:
        maps = _sum_to_one(maps)
    return maps.reshape(*attention.shape[:3], *layout.grid)


class Rollout:
    """Attention rollout (Abnar & Zuidema, 2020), one layer at a time, the first layer first.

    Heads are reduced by mean, maximum or minimum; ``residual`` of the identity is the residual connection; rows are
    normalized to sum to one, and the layers multiplied. Row i of the result (B, N, N) is what token i holds of each
    input token. Only one layer and the result are in memory.
    """

    def __init__(self, *, head: Head = "mean", residual: float = 0.5) -> None:
        if head not in HEADS:
            raise InvalidOption(f"head must be one of {', '.join(HEADS)}; got {head!r}")
        if not 0 <= residual <= 1:
            raise InvalidOption(f"residual, the share of the identity, must be between 0 and 1; got {residual}")
        self.head, self.residual = head, residual
        self.layers = 0
        self._result: Tensor | None = None

    @torch.no_grad()
    def add(self, attention: Tensor) -> None:
        """Add the attention (B, H, N, N) of the next layer."""
        check_shape(attention, f"attention of layer {self.layers}", f"B H {attention.shape[-1]} {attention.shape[-1]}")
        check_finite(attention, f"attention rows of layer {self.layers}")
        joined = HEADS[self.head](attention.detach()) * (1 - self.residual)
        joined.diagonal(dim1=1, dim2=2).add_(self.residual)
        joined = _sum_to_one(joined)
        if self._result is not None and self._result.shape != joined.shape:
            raise UnsupportedInput(
                f"layer {self.layers} has attention {tuple(joined.shape)} (images, tokens, tokens), the layers before "
                f"{tuple(self._result.shape)}; rollout needs a model that is not merged"
            )
        self._result = joined if self._result is None else joined @ self._result
        self.layers += 1

    @property
    def result(self) -> Tensor:
        """Share of each input token in each token, (B, N, N)."""
        if self._result is None:
            raise UnsupportedInput("rollout needs the attention of at least one layer; got none")
        return self._result


@fitting
def rollout(attentions: Iterable[Tensor], *, head: Head = "mean", residual: float = 0.5) -> Tensor:
    """Return the attention rollout (B, N, N) of layers (B, H, N, N), the first layer first; see :class:`Rollout`.

    Layers may come from a generator. For maps of special tokens, pass
    ``rollout(...)[:, None, :layout.num_special]`` to :func:`token_maps`.
    """
    followed = Rollout(head=head, residual=residual)
    for attention in attentions:
        followed.add(attention)
    return followed.result


class RoleMass(Result, eq=False):
    """Share of its attention that each role gives to each role.

    Attributes:
        queries, keys: roles of the query tokens, and of all tokens.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    mass: Tensor  # (queries, keys) mean over images, heads and the query tokens of the role; rows sum to one
    per_head: Tensor  # (H, queries, keys) the same for each head
    fair: Tensor  # (keys,) share of each role among all tokens: the mass under uniform attention


@fitting
@torch.no_grad()
def role_mass(attention: Tensor, layout: TokenLayout, *, queries: Sequence[int] | None = None) -> RoleMass:
    """Sum attention rows (B, H, Q, N) by the roles of their tokens; each named task token is a role of its own."""
    _check_rows(attention, layout)
    tokens = _queries(attention, layout, queries)
    spans: dict[str, list[int]] = {}
    for name, (_, where) in zip(span_names(span for span, _ in layout.spans()), layout.spans(), strict=True):
        spans.setdefault(name, []).extend(where)
    keys = {name: torch.tensor(where, device=attention.device) for name, where in spans.items()}
    rows_of = {name: [row for row, token in enumerate(tokens) if token in where] for name, where in spans.items()}
    asking = {name: rows for name, rows in rows_of.items() if rows}
    total = torch.zeros(attention.shape[1], len(asking), len(keys), dtype=torch.float64)
    for part in chunks(len(attention), attention[0].numel()):
        x = at_least_float32(attention[part])
        given = torch.stack([x.index_select(-1, where).sum(-1) for where in keys.values()], -1)
        whole = given.sum(-1, keepdim=True)
        if ((whole - 1).abs() > 0.02).any():
            raise UnsupportedInput(
                f"attention rows must sum to one (softmax over all {layout.num_tokens} tokens); got sums from "
                f"{whole.min().item():g} to {whole.max().item():g}"
            )
        given = given / whole
        for place, rows in enumerate(asking.values()):
            total[:, place] += given[:, :, rows].mean(2).sum(0).cpu().double()
    per_head = total / len(attention)
    fair = torch.tensor([len(where) for where in spans.values()]) / layout.num_tokens
    return RoleMass(tuple(asking), tuple(keys), per_head.mean(0), per_head, fair)


class Overlap(Result, eq=False):
    """Similarity of the maps of tokens: (Q, Q) each, means over images and heads."""

    cosine: Tensor  # 1 for proportional maps, 0 for disjoint ones
    divergence: Tensor  # Jensen–Shannon in bits: 0 for equal maps, 1 for disjoint ones
    top_iou: Tensor  # intersection over union of the ``top`` patches with the most attention
    top: int  # number of these patches
    left_out: int  # number of maps (images × heads × tokens) that are all zero, and left out


@fitting
@torch.no_grad()
def overlap(maps: Tensor, *, top: float = 0.1) -> Overlap:
    """Compare the maps (B, H, Q, t, h, w) of tokens, such as registers; ``top`` is a share of the patches."""
    if not 0 < top <= 1:
        raise InvalidOption(f"top, a share of the patches, must be above 0 and at most 1; got {top}")
    flat = _flat(maps)
    tokens, patches = flat.shape[2:]
    count = max(1, round(top * patches))
    total, pairs = torch.zeros(3, tokens, tokens, dtype=torch.float64), torch.zeros(tokens, tokens, dtype=torch.float64)
    empty = 0
    for part in chunks(len(flat), 6 * flat[0].numel()):
        x = at_least_float32(flat[part])
        there = x.sum(-1) > 0
        x = _sum_to_one(x)
        empty += int((~there).sum())
        unit = F.normalize(x, dim=-1)
        best = torch.zeros_like(x).scatter_(-1, x.argsort(dim=-1, descending=True, stable=True)[..., :count], 1.0)
        own = torch.xlogy(x, x).sum(-1)
        for one in range(tokens):
            both = there & there[:, :, one, None]
            middle = (x + x[:, :, one, None]) / 2
            bits = ((own + own[:, :, one, None]) / 2 - torch.xlogy(middle, middle).sum(-1)) / math.log(2)
            common = (best * best[:, :, one, None]).sum(-1)
            measures = (unit * unit[:, :, one, None]).sum(-1), bits.clamp(0, 1), common / (2 * count - common)
            for place, measure in enumerate(measures):
                total[place, one] += (measure * both).sum((0, 1)).cpu().double()
            pairs[one] += both.sum((0, 1)).cpu()
    cosine, divergence, shared = total / pairs
    return Overlap(cosine, divergence, shared, count, empty)


ALIKE = 0.98
"""Cosine from which on the maps of two tokens are shown as one."""


@checked
def alike_maps(maps: Mapping[str, Tensor], least: float = ALIKE) -> dict[str, dict[str, float]]:
    """Return the tokens whose maps differ, each with the later tokens whose maps are like its own, and their cosines.

    >>> alike_maps({"class": torch.tensor([1.0, 0]), "task": torch.tensor([2.0, 0]), "color": torch.tensor([0, 1.0])})
    {'class': {'task': 1.0}, 'color': {}}
    """
    groups: dict[str, dict[str, float]] = {}
    for token, values in maps.items():
        cosines = {
            first: float(F.cosine_similarity(values.double().flatten(), maps[first].double().flatten(), dim=0))
            for first in groups
        }
        like = next((first for first, cosine in cosines.items() if cosine >= least), None)
        if like is None:
            groups[token] = {}
        else:
            groups[like][token] = cosines[like]
    return groups


class Spread(Result, eq=False):
    """Entropy of the maps of each token in bits: means over images and heads (Q,), and by head (H, Q).

    ``effective`` is the effective number of patches, 2 to the entropy: between 1 and all.
    """

    entropy: Tensor
    effective: Tensor
    entropy_per_head: Tensor
    effective_per_head: Tensor
    patches: int


@fitting
@torch.no_grad()
def entropy(maps: Tensor) -> Tensor:
    """Return the entropy in bits of each map (B, H, Q, t, h, w): (B, H, Q); NaN for maps that are all zero."""

    def bits(part: Tensor) -> Tensor:
        x = at_least_float32(part)
        x = x / x.sum(-1, keepdim=True)
        return (-torch.xlogy(x, x).sum(-1) / math.log(2)).clamp(min=0)

    flat = _flat(maps)
    return map_chunks(bits, flat, 2 * flat[0].numel())


@fitting
@torch.no_grad()
def spread(maps: Tensor) -> Spread:
    """Return the spread of maps (B, H, Q, t, h, w); maps that are all zero are left out."""
    bits = entropy(maps).double().cpu()
    effective = torch.exp2(bits)
    over_heads, by_head = ((bits.nanmean(axes), effective.nanmean(axes)) for axes in ((0, 1), (0,)))
    return Spread(*over_heads, *by_head, maps[0, 0, 0].numel())


SPIKE = 5.0
"""A patch is a spike of a map where its prominence is larger: five times the median and the neighborhood."""


class MapQuality(Result, eq=False):
    """Quality of the maps of Q tokens, averaged over heads: how much lies on the object, and how much on single spots.

    What needs masks is None without them. Images without an object, or with nothing but an object, are left out there.
    """

    on_object: Tensor | None  # (Q,) share of the attention on the object, mean over images
    fair: float | None  # the object's share of the patches: what uniform attention would have
    patch_hit: Tensor | None  # (Q,) share of images whose patch with the most attention lies on the object
    object_images: int  # images with an object
    spikes: Tensor  # (Q,) mean number of spikes in a map
    on_spikes: Tensor  # (Q,) share of the attention on spikes, mean over images


@fitting
@torch.no_grad()
def map_quality(maps: Tensor, object_share: Tensor | None = None) -> MapQuality:
    """Measure maps (B, H, Q, t, h, w), as `token_maps` returns them.

    Args:
        maps: attention maps.
        object_share: (B, P), the object's share of each patch, from `pool_mask`; NaN where unknown. A patch lies on
            the object if at least half of it does.
    """
    check_shape(maps, "maps", "B H Q t h w")
    mean = _sum_to_one(_flat(maps).mean(1, dtype=torch.float64)).cpu()  # (B, Q, P)
    images, _, patches = mean.shape
    grid = (int(maps.shape[3]), int(maps.shape[4]), int(maps.shape[5]))
    spike = prominence(mean.reshape(-1, patches), grid=grid).reshape(mean.shape) > SPIKE
    spikes, on_spikes = spike.double().sum(-1).mean(0), (mean * spike).sum(-1).mean(0)
    if object_share is None:
        return MapQuality(None, None, None, 0, spikes, on_spikes)
    check_shape(object_share, "object_share", f"{images} {patches}")
    share = object_share.detach().double().cpu()
    known = share.isfinite()
    share = share.nan_to_num(0.0)
    area = share.sum(1) / known.sum(1).clamp_min(1)
    usable = (area > 0) & (area < 1)
    if not usable.any():
        return MapQuality(None, None, None, 0, spikes, on_spikes)
    seen = (mean * known[:, None])[usable]
    on_object = (seen * share[usable, None]).sum(-1) / seen.sum(-1).clamp_min(1e-300)
    hit = share[usable].gather(1, seen.argmax(-1)) >= 0.5
    fair = float(area[usable].mean())
    return MapQuality(on_object.mean(0), fair, hit.double().mean(0), int(usable.sum()), spikes, on_spikes)


def _sum_to_one(x: Tensor) -> Tensor:
    """Normalize rows along the last axis; rows of zeros stay zero."""
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total > 0, total, 1.0)


def _flat(maps: Tensor) -> Tensor:
    check_shape(maps, "maps", "B H Q t h w", ", from token_maps")
    check_finite(maps, "maps")
    if (maps < 0).any():
        raise UnsupportedInput("attention maps must not be negative; use attention after the softmax")
    return maps.detach().flatten(3)


def _check_rows(attention: Tensor, layout: TokenLayout) -> None:
    check_shape(attention, "attention", f"B H Q {layout.num_tokens}", f", for {layout}. Merged tokens have no grid")
    check_finite(attention, "attention rows")


def _queries(attention: Tensor, layout: TokenLayout, queries: Sequence[int] | None) -> list[int]:
    """Return the token of each row."""
    rows = attention.shape[2]
    if queries is None and rows in (layout.num_special, layout.num_tokens):
        return list(range(rows))
    if queries is None or len(queries) != rows or not all(0 <= token < layout.num_tokens for token in queries):
        raise InvalidOption(
            f"queries must be one token (0 to {layout.num_tokens - 1}) for each of {rows} rows; they may be left out "
            f"for rows of all special tokens or of all tokens; got {queries}"
        )
    return list(queries)
