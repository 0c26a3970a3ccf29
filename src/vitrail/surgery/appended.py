"""Tokens that were appended to a model, and the layout that its blocks then see."""

from __future__ import annotations

from vitrail.adapters import Found
from vitrail.tokens import Role, TokenLayout, TokenSpan

MARK = "_vitrail_registers"
"""Attribute of a trunk that carries test-time registers."""

NAME = "test-time"
"""Name of the appended tokens in a layout."""


def layout_of(found: Found, size: tuple[int, int] | None = None) -> TokenLayout:
    """Give a model's tokens as its blocks see them: with the registers that were appended to it."""
    layout = found.adapter.layout(found.trunk, size)
    handle = getattr(found.trunk, MARK, None)
    if handle is None:
        return layout
    return TokenLayout((*layout.special, TokenSpan(Role.REGISTER, handle.registers, NAME)), layout.grid)
