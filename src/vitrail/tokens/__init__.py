"""Roles of tokens and their positions in the sequence."""

from vitrail.tokens.layout import Role, TokenLayout, TokenSpan, span_names, token_names
from vitrail.tokens.spec import TokenSpec, check_specs

__all__ = ["Role", "TokenLayout", "TokenSpan", "TokenSpec", "check_specs", "span_names", "token_names"]
