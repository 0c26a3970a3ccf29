"""What is asked of a model: which values, layers and tokens, checked against what it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitrail.errors import InvalidOption
from vitrail.tokens import Role, TokenLayout

BY_LAYER = ("tokens", "norms", "q", "k", "v", "attention", "mlp")
"""What there is to see in each layer."""

WHAT = ("embedding", *BY_LAYER)


def check_what(what: Sequence[str]) -> frozenset[str]:
    """Check the names of what to look at."""
    names = listed(what, str)
    wrong = [name for name in names if name not in WHAT]
    if wrong or not names:
        raise InvalidOption(
            f"what to record is one or more of {', '.join(WHAT)}; got {', '.join(map(str, wrong)) or what}"
        )
    return frozenset(names)


def listed(value: Any, one: Any) -> tuple[Any, ...]:
    """Give several of something, or one, as a tuple; what is neither is one, and is refused by whoever checks it."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, one) else (value,)


def check_layers(layers: int | Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """Check the numbers of layers, negative ones counted from the end; None for all of them."""
    if layers is None:
        return tuple(range(depth))
    given = listed(layers, str)
    wrong = [layer for layer in given if not is_whole(layer) or not -depth <= layer < depth]
    if wrong or not given:
        raise InvalidOption(f"layers are numbers from {-depth} to {depth - 1} for this model; got {wrong or given}")
    return tuple(sorted({layer % depth for layer in given}))


def is_whole(value: Any) -> bool:
    """Whether something is a whole number, and not yes or no."""
    return isinstance(value, int) and not isinstance(value, bool)


def find_queries(queries: Any, layout: TokenLayout) -> tuple[int, ...]:
    """Turn roles and positions into positions; None for all tokens that are not patches."""
    if queries is None:
        queries = range(layout.num_special)
    given = listed(queries, str | Role)
    found: list[int] = []
    for query in given:
        if is_whole(query) and -layout.num_tokens <= query < layout.num_tokens:
            found.append(query % layout.num_tokens)
        elif isinstance(query, str) and query in [role.value for role in Role]:
            found += layout.indices(query)
        else:
            raise InvalidOption(
                f"queries are roles ({', '.join(role.value for role in Role)}) or positions below {layout.num_tokens}; "
                f"got {query!r}"
            )
    if not found:
        raise InvalidOption(
            f"there is no such token: this model has {describe(layout)}, and asked for are "
            f"{'all but patches' if queries == range(layout.num_special) else queries}. Give roles or positions"
        )
    return tuple(dict.fromkeys(found))


def describe(layout: TokenLayout) -> str:
    """Say which tokens a model has: "1 class, 4 register, 196 patch"."""
    return ", ".join(f"{span.count} {span.role.value}" for span, _ in layout.spans())
