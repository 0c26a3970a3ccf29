"""Redundancy and specialization of special tokens; ``docs/tokens.md`` explains the measures."""

from vitrail.analysis.roles.measures import (
    Collapse,
    Cosines,
    Disagreement,
    ParameterCosines,
    Roles,
    Thresholds,
    TokenAttention,
    cosine_matrix,
    disagreement,
    find_collapsed,
    measure_roles,
    token_attention,
    token_cosines,
    token_parameters,
)

__all__ = [
    "Collapse",
    "Cosines",
    "Disagreement",
    "ParameterCosines",
    "Roles",
    "Thresholds",
    "TokenAttention",
    "cosine_matrix",
    "disagreement",
    "find_collapsed",
    "measure_roles",
    "token_attention",
    "token_cosines",
    "token_parameters",
]
