"""Roles of tokens, and where in the sequence they stand."""

from vitrail.tokens.layout import Role, TokenLayout, TokenSpan
from vitrail.tokens.names import span_names, token_names
from vitrail.tokens.spec import TokenSpec, check_specs

__all__ = ["Role", "TokenLayout", "TokenSpan", "TokenSpec", "check_specs", "span_names", "token_names"]
