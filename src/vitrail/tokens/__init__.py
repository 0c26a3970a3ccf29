"""Roles of tokens, and where in the sequence they stand."""

from vitrail.tokens.layout import Role, TokenLayout, TokenSpan

__all__ = ["Role", "TokenLayout", "TokenSpan"]
