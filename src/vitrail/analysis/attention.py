"""What tokens look at: maps by token and head, rollout, mass between roles, overlap between tokens.

Attention comes as rows (B, H, Q, N): for each picture and head, the softmaxed row of each of Q query tokens over all N
tokens. Which tokens the rows belong to is said by ``queries``, their positions; without it, Q rows are those of all
special tokens, or of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.analysis.features import steps, working
from vitrail.analysis.probes.inputs import check_finite
from vitrail.analysis.result import Result
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import Role, TokenLayout, span_names

Head = Literal["mean", "max", "min"]


def _mean_heads(x: Tensor) -> Tensor:
    return x.mean(1, dtype=torch.promote_types(x.dtype, torch.float32))


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean_heads,
    "max": lambda x: working(x.amax(1)),
    "min": lambda x: working(x.amin(1)),
}


@torch.no_grad()
def token_maps(attention: Tensor, layout: TokenLayout, *, normalise: bool = True) -> Tensor:
    """Give what each row says about patches, on their grid: (B, H, Q, N) becomes (B, H, Q, t, h, w).

    Normalised, each map sums to one over the patches: how the attention that patches get is shared among them. A row
    that gives nothing to any patch stays zero.
    """
    _check_rows(attention, layout)
    maps = working(attention[..., layout.patches])
    if normalise:
        maps = maps / _no_zero(maps.sum(-1, keepdim=True))
    return maps.reshape(*attention.shape[:3], *layout.grid)


@torch.no_grad()
def role_maps(
    attention: Tensor,
    layout: TokenLayout,
    role: Role | str,
    *,
    queries: Sequence[int] | None = None,
    normalise: bool = True,
) -> Tensor:
    """Give the maps of all query tokens of one role, in their order: (B, H, count, t, h, w); count may be zero."""
    wanted = set(layout.indices(role))
    rows = [row for row, token in enumerate(_queries(attention, layout, queries)) if token in wanted]
    return token_maps(attention[:, :, rows], layout, normalise=normalise)


class Rollout:
    """Attention followed through layers (Abnar & Zuidema, 2020), which are added one at a time, first one first.

    Heads are joined by their mean, maximum or minimum; the residual connection is ``residual`` of the identity; rows
    are made to sum to one, and the layers multiplied. Row i of the result (B, N, N) says what token i holds of each
    input token. No more than one layer and the result are in memory.
    """

    def __init__(self, *, head: Head = "mean", residual: float = 0.5) -> None:
        if head not in HEADS:
            raise InvalidOption(f"heads are joined by one of {', '.join(HEADS)}; got {head!r}")
        if not 0 <= residual <= 1:
            raise InvalidOption(f"residual is the share of the identity, 0 to 1; got {residual}")
        self.head, self.residual = head, residual
        self.layers = 0
        self._result: Tensor | None = None

    @torch.no_grad()
    def add(self, attention: Tensor) -> None:
        """Follow attention (B, H, N, N) through the next layer."""
        if attention.ndim != 4 or attention.shape[2] != attention.shape[3] or 0 in attention.shape:
            raise UnsupportedInput(
                f"rollout needs whole attention (pictures, heads, tokens, tokens); layer {self.layers} has "
                f"{tuple(attention.shape)}"
            )
        check_finite(attention, f"attention rows of layer {self.layers}")
        joined = HEADS[self.head](attention.detach()) * (1 - self.residual)
        joined.diagonal(dim1=1, dim2=2).add_(self.residual)
        joined /= _no_zero(joined.sum(-1, keepdim=True))
        if self._result is not None and self._result.shape != joined.shape:
            raise UnsupportedInput(
                f"layer {self.layers} has attention for {tuple(joined.shape)} (pictures, tokens, tokens), those before "
                f"for {tuple(self._result.shape)}; follow models that are not merged"
            )
        self._result = joined if self._result is None else joined @ self._result
        self.layers += 1

    @property
    def result(self) -> Tensor:
        """What each token holds of each input token, (B, N, N)."""
        if self._result is None:
            raise UnsupportedInput("rollout needs the attention of one layer or more; got none")
        return self._result


def rollout(attentions: Iterable[Tensor], *, head: Head = "mean", residual: float = 0.5) -> Tensor:
    """Follow attention through layers, (B, H, N, N) each, first one first: (B, N, N); see :class:`Rollout`.

    Layers may come from a generator. For maps of special tokens, give
    ``rollout(...)[:, None, :layout.num_special]`` to :func:`token_maps`.
    """
    followed = Rollout(head=head, residual=residual)
    for attention in attentions:
        followed.add(attention)
    return followed.result


@dataclass(frozen=True, eq=False)
class RoleMass(Result):
    """How much of its attention each role gives to each role.

    Attributes:
        queries: roles that ask, those in the rows.
        keys: roles that are asked.
        mass: (queries, keys) mean over pictures, heads and the tokens of the asking role; rows sum to one.
        per_head: (H, queries, keys) the same for each head.
        fair: (keys,) share of each role among all tokens: what even attention would give.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    mass: Tensor
    per_head: Tensor
    fair: Tensor


@torch.no_grad()
def role_mass(attention: Tensor, layout: TokenLayout, *, queries: Sequence[int] | None = None) -> RoleMass:
    """Sum attention rows (B, H, Q, N) by the roles of their tokens; task tokens with names stand by themselves."""
    _check_rows(attention, layout)
    tokens = _queries(attention, layout, queries)
    spans: dict[str, list[int]] = {}
    for name, (_, where) in zip(span_names(span for span, _ in layout.spans()), layout.spans(), strict=True):
        spans.setdefault(name, []).extend(where)
    keys = {name: torch.tensor(where, device=attention.device) for name, where in spans.items()}
    asking = {name: [row for row, token in enumerate(tokens) if token in where] for name, where in spans.items()}
    asking = {name: rows for name, rows in asking.items() if rows}
    total = torch.zeros(attention.shape[1], len(asking), len(keys), dtype=torch.float64)
    for part in steps(len(attention), attention[0].numel()):
        x = working(attention[part])
        given = torch.stack([x.index_select(-1, where).sum(-1) for where in keys.values()], -1)
        whole = given.sum(-1, keepdim=True)
        if ((whole - 1).abs() > 0.02).any():
            raise UnsupportedInput(
                f"attention rows must be softmaxed over all {layout.num_tokens} tokens and sum to one; got sums from "
                f"{whole.min().item():g} to {whole.max().item():g}"
            )
        given = given / whole
        for place, rows in enumerate(asking.values()):
            total[:, place] += given[:, :, rows].mean(2).sum(0).cpu().double()
    per_head = total / len(attention)
    fair = torch.tensor([len(where) for where in spans.values()]) / layout.num_tokens
    return RoleMass(tuple(asking), tuple(keys), per_head.mean(0), per_head, fair)


@dataclass(frozen=True, eq=False)
class Overlap(Result):
    """How alike the maps of tokens are: (Q, Q) each, means over pictures and heads.

    Attributes:
        cosine: 1 for maps of the same shape, 0 for maps with nothing in common.
        divergence: Jensen–Shannon in bits: 0 for the same, 1 for nothing in common.
        top_iou: intersection over union of the ``top`` patches that each looks at most.
        top: how many patches that is.
        left_out: how many of the maps (pictures × heads × tokens) are zero everywhere, and left out.
    """

    cosine: Tensor
    divergence: Tensor
    top_iou: Tensor
    top: int
    left_out: int


@torch.no_grad()
def overlap(maps: Tensor, *, top: float = 0.1) -> Overlap:
    """Compare the maps (B, H, Q, t, h, w) of tokens, such as registers; ``top`` is a share of the patches."""
    if not 0 < top <= 1:
        raise InvalidOption(f"top is a share of the patches, above 0 and up to 1; got {top}")
    flat = _flat(maps)
    tokens, patches = flat.shape[2:]
    count = max(1, round(top * patches))
    total, pairs = torch.zeros(3, tokens, tokens, dtype=torch.float64), torch.zeros(tokens, tokens, dtype=torch.float64)
    empty = 0
    for part in steps(len(flat), 6 * flat[0].numel()):
        x = working(flat[part])
        mass = x.sum(-1, keepdim=True)
        there = mass.squeeze(-1) > 0
        x = x / _no_zero(mass)
        empty += int((~there).sum())
        unit = torch.nn.functional.normalize(x, dim=-1)
        best = torch.zeros_like(x).scatter_(-1, x.argsort(dim=-1, descending=True, stable=True)[..., :count], 1.0)
        own = torch.xlogy(x, x).sum(-1)
        for one in range(tokens):
            both = there & there[:, :, one, None]
            middle = (x + x[:, :, one, None]) / 2
            bits = ((own + own[:, :, one, None]) / 2 - torch.xlogy(middle, middle).sum(-1)) / torch.log(
                x.new_tensor(2.0)
            )
            common = (best * best[:, :, one, None]).sum(-1)
            measures = (unit * unit[:, :, one, None]).sum(-1), bits.clamp(0, 1), common / (2 * count - common)
            for place, measure in enumerate(measures):
                total[place, one] += (measure * both).sum((0, 1)).cpu().double()
            pairs[one] += both.sum((0, 1)).cpu()
    cosine, divergence, shared = total / pairs
    return Overlap(cosine, divergence, shared, count, empty)


@dataclass(frozen=True, eq=False)
class Spread(Result):
    """How widely each token looks, as means over pictures: (Q,), and (H, Q) by head.

    Attributes:
        entropy: of the map, in bits.
        effective: number of patches that a map as even as this one would cover, between 1 and all.
    """

    entropy: Tensor
    effective: Tensor
    entropy_per_head: Tensor
    effective_per_head: Tensor
    patches: int


@torch.no_grad()
def entropy(maps: Tensor) -> Tensor:
    """Give the entropy, in bits, of each map (B, H, Q, t, h, w): (B, H, Q); not a number where a map is all zero."""
    flat = _flat(maps)
    found = torch.empty(flat.shape[:3], dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
    for part in steps(len(flat), 2 * flat[0].numel()):
        x = working(flat[part])
        x = x / x.sum(-1, keepdim=True)
        found[part] = -torch.xlogy(x, x).sum(-1) / torch.log(x.new_tensor(2.0))
    return found.clamp(min=0)


@torch.no_grad()
def spread(maps: Tensor) -> Spread:
    """Say how widely tokens look by their maps (B, H, Q, t, h, w); maps that are all zero are left out."""
    bits = entropy(maps).double().cpu()
    effective = torch.exp2(bits)
    return Spread(
        bits.nanmean((0, 1)),
        effective.nanmean((0, 1)),
        bits.nanmean(0),
        effective.nanmean(0),
        maps[0, 0, 0].numel(),
    )


def _no_zero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)


def _flat(maps: Tensor) -> Tensor:
    if maps.ndim != 6 or 0 in maps.shape:
        raise UnsupportedInput(
            f"maps must be (pictures, heads, tokens, time, height, width), as from token_maps; got {tuple(maps.shape)}"
        )
    check_finite(maps, "maps")
    if (maps < 0).any():
        raise UnsupportedInput("maps of attention have no negative values; take them after the softmax")
    return maps.detach().flatten(3)


def _check_rows(attention: Tensor, layout: TokenLayout) -> None:
    if attention.ndim != 4 or attention.shape[3] != layout.num_tokens:
        raise UnsupportedInput(
            f"attention must be (pictures, heads, queries, {layout.num_tokens} tokens) for {layout}; "
            f"got {tuple(attention.shape)}; merged tokens have no grid"
        )
    check_finite(attention, "attention rows")


def _queries(attention: Tensor, layout: TokenLayout, queries: Sequence[int] | None) -> list[int]:
    """Say which token each row belongs to."""
    rows = attention.shape[2]
    if queries is None and rows in (layout.num_special, layout.num_tokens):
        return list(range(rows))
    if queries is None:
        raise InvalidOption(
            f"{rows} rows are neither the {layout.num_special} special tokens nor all {layout.num_tokens}; "
            "say with queries which tokens they belong to"
        )
    if len(queries) != rows or not all(0 <= token < layout.num_tokens for token in queries):
        raise InvalidOption(
            f"queries names one token (0 to {layout.num_tokens - 1}) for each of {rows} rows; got {queries}"
        )
    return list(queries)
