"""Features by which tokens are compared: one table, from names to functions of a block's context.

A mix of several, such as ``{"keys": 0.7, "tokens": 0.3}``, compares by the weighted mean of their cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InvalidOption

if TYPE_CHECKING:
    from vitrail.merging.method import Context

Features = str | Mapping[str, float]
"""One name of ``FEATURES``, or several with their weights."""


def mean_over_heads(heads: Tensor) -> Tensor:
    """Return the mean of features (B, H, N, d) over heads, in float32 or better."""
    return heads.mean(1, dtype=torch.promote_types(heads.dtype, torch.float32))


FEATURES: dict[str, Callable[[Context], Tensor]] = {
    "keys": lambda context: mean_over_heads(context.k),
    "queries": lambda context: mean_over_heads(context.q),
    "values": lambda context: mean_over_heads(context.v),
    "tokens": lambda context: context.x,
    "rotated_keys": lambda context: mean_over_heads(context.rotated_k),
    "rotated_queries": lambda context: mean_over_heads(context.rotated_q),
}
"""Features (B, N, D) of a block's tokens by name; those without ``rotated_`` are before rotary position."""


def check_features(features: Features) -> Features:
    """Return valid features as they are; raise ``InvalidOption`` for others."""
    weights = {features: 1.0} if isinstance(features, str) else features
    valid = isinstance(weights, Mapping) and weights and all(name in FEATURES for name in weights)
    if not valid or not all(_is_weight(weight) for weight in weights.values()):
        raise InvalidOption(
            f"features is one of {', '.join(FEATURES)}, or a dict of them with weights above 0; got {features!r}"
        )
    return features if isinstance(features, str) else {name: float(weight) for name, weight in weights.items()}


def _is_weight(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def compute_features(context: Context, features: Features) -> Tensor:
    """Compute features (B, N, D) whose cosine is the requested similarity."""
    if isinstance(features, str):
        return FEATURES[features](context)
    # the dot product of unit vectors, each scaled by the root of its weight, is the weighted sum of their cosines
    parts = [F.normalize(FEATURES[name](context), dim=-1) * weight**0.5 for name, weight in features.items()]
    work = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.cat([part.to(work) for part in parts], -1)
