"""Attention sinks: tokens that take much of a head's attention, and what the head gets from them.

Two kinds are told apart (arXiv 2606.08105). The value of a *no-op* sink is near zero: a head that attends to it adds
almost nothing. A *broadcast* sink has an ordinary value, which all queries read: the head's output is of rank one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import check_finite, check_shape
from vitrail.analysis.result import Result
from vitrail.tokens import TokenLayout

SINK = 0.3
"""Mean share of the attention from which on a token is a sink of a head."""

NO_OP = 0.25
"""Largest norm of the value of a no-op sink, relative to the median of the other tokens in its head."""

BROADCAST = 0.9
"""Least share of a head's output, as squared norm over queries, in one direction for a broadcast sink."""


class Sinks(Result):
    """Sinks of some heads, each counted once per image."""

    heads: int  # heads × images
    no_op: int  # of these, with a sink whose value is near zero
    broadcast: int  # with a sink whose value is not near zero, and outputs of rank one
    other: int  # with a sink that is neither
    roles: dict[str, int]  # sinks by the role of the token
    value_norm: float | None  # median norm of the sinks' values over that of the other tokens; None without sinks
    rank_one: float | None  # median share of the heads' output in one direction, for sinks that are no no-ops

    @property
    def count(self) -> int:
        """Heads × images with a sink."""
        return self.no_op + self.broadcast + self.other

    @property
    def share(self) -> float:
        """Share of heads × images with a sink."""
        return self.count / self.heads if self.heads else 0.0


class HeadSinks(Result, eq=False):
    """The token with the most attention in each head: (B, H) each."""

    token: Tensor  # its position
    attention: Tensor  # mean share of the queries' attention
    value_norm: Tensor  # norm of its value over the median of the other tokens
    rank_one: Tensor  # share of the head's output in its first direction; 1 if all queries read the same


@fitting
@torch.no_grad()
def find_sinks(attention: Tensor, values: Tensor) -> HeadSinks:
    """Return the token with the most attention in each head.

    Args:
        attention: rows (B, H, Q, N) of Q query tokens, which sum to one.
        values: values (B, H, N, d) of all tokens.
    """
    check_shape(attention, "attention", "B H Q N")
    batch, heads, _, tokens = attention.shape
    check_shape(values, "values", f"{batch} {heads} {tokens} d")
    check_finite(attention, "attention rows")
    check_finite(values, "values")
    rows, values = attention.detach().double(), values.detach().double()
    received, token = rows.mean(2).max(-1)
    norms = values.norm(dim=-1)
    own = norms.gather(-1, token[..., None]).squeeze(-1)
    others = norms.scatter(-1, token[..., None], torch.nan).nanmedian(-1).values
    energy = torch.linalg.svdvals(rows @ values).square()
    rank_one = energy[..., 0] / energy.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return HeadSinks(token, received, own / others.clamp(min=torch.finfo(torch.float64).tiny), rank_one)


def count_sinks(found: Iterable[HeadSinks], layout: TokenLayout) -> Sinks:
    """Return how many heads have a sink, of which kind, and the roles of these tokens."""
    parts = list(found)
    token, attention, value_norm, rank_one = (
        torch.cat([getattr(part, name).flatten() for part in parts])
        for name in ("token", "attention", "value_norm", "rank_one")
    )
    sink = attention >= SINK
    no_op = sink & (value_norm <= NO_OP)
    reading = sink & ~no_op
    broadcast = reading & (rank_one >= BROADCAST)
    roles = Counter(layout.role_of(position).value for position in token[sink].tolist())
    return Sinks(
        heads=len(sink),
        no_op=int(no_op.sum()),
        broadcast=int(broadcast.sum()),
        other=int((reading & ~broadcast).sum()),
        roles=dict(roles.most_common()),
        value_norm=float(value_norm[sink].median()) if sink.any() else None,
        rank_one=float(rank_one[reading].median()) if reading.any() else None,
    )
