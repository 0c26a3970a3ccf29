"""Tokens that were appended to a model, and the layout that its blocks then see."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.adapters import Found
from vitrail.runtime.side_tokens import Beside
from vitrail.tokens import Role, TokenLayout, TokenSpan

MARK = "_vitrail_registers"
"""Attribute of a trunk that carries test-time registers."""

NAME = "test-time"
"""Name of the appended tokens in a layout."""


def layout_of(found: Found, size: tuple[int, ...] | None = None) -> TokenLayout:
    """Give a model's tokens as its last block sees them: with those that were appended or added to it."""
    layout = found.adapter.layout_in(found.trunk, -1, size)
    handle = getattr(found.trunk, MARK, None)
    more: tuple[TokenSpan, ...] = ()
    if handle is not None:
        more = (TokenSpan(Role.REGISTER, handle.registers, NAME),)
    added = added_to(found)
    if added is not None:
        more = tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in added.specs)
    return TokenLayout((*layout.special, *more), layout.grid)


def token_values(found: Found) -> dict[tuple[Role, str], Tensor]:
    """Give the learned values (1, count, D) of special tokens, those added among them, by role and name."""
    added = added_to(found)
    more = {} if added is None else {(spec.role, spec.name): added.values[spec.name] for spec in added.specs}
    return {**found.adapter.token_parameters(found.trunk), **more}


def all_entered(found: Found) -> int:
    """Give the first layer that has all of a model's tokens."""
    last = found.adapter.layout_in(found.trunk, -1)
    layers = range(len(found.blocks))
    first = next(layer for layer in layers if found.adapter.layout_in(found.trunk, layer) == last)
    added = added_to(found)
    return first if added is None else max(first, *(spec.enters for spec in added.specs))


def added_to(found: Found) -> Beside | None:
    """Give what `vitrail.add_tokens` added to a model, where something was."""
    plan: Any = getattr(found.trunk, "_vitrail_plan", None)
    return None if plan is None else plan.added
