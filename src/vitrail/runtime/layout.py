"""Layouts of models with added tokens or test-time registers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.adapters import Found
from vitrail.merging import ModelShape
from vitrail.runtime.side_tokens import SideTokens
from vitrail.tokens import Role, TokenLayout, TokenSpan

MARK = "_vitrail_registers"
"""Attribute of a trunk that holds the handle of its test-time registers."""

NAME = "test-time"
"""Name of test-time registers in a layout."""


def layout_of(found: Found, size: tuple[int, ...] | None = None) -> TokenLayout:
    """Return the layout in the last block, with added tokens and test-time registers."""
    layout = found.adapter.layout_in(found.trunk, -1, size)
    handle = getattr(found.trunk, MARK, None)
    more: tuple[TokenSpan, ...] = ()
    if handle is not None:
        more = (TokenSpan(Role.REGISTER, handle.registers, NAME),)
    added = added_to(found)
    if added is not None:
        more = tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in added.specs)
    return TokenLayout((*layout.special, *more), layout.grid)


def model_shape(found: Found) -> ModelShape:
    """Return the facts about a model that methods and restorers with parameters need."""
    parts, block = found.block_adapters[0], found.blocks[0]
    heads, head_width = parts.head_shape(block)
    width = getattr(parts.feed_last(block), "out_features", heads * head_width)
    layout, training = found.adapter.layout(found.trunk), found.trunk.training
    weights = tuple(
        (f"{index}.{name}", tuple(weight.shape))
        for index, one in enumerate(found.blocks)
        for name, weight in one.named_parameters()
    )
    return ModelShape(
        len(found.blocks),
        int(width),
        heads,
        head_width,
        layout.num_special,
        first_class_token(layout),
        layout.grid,
        training,
        weights=weights,
    )


def token_values(found: Found) -> dict[tuple[Role, str], Tensor]:
    """Return the parameters (1, count, D) of special tokens, including added ones, by role and name."""
    added = added_to(found)
    more = {} if added is None else {(spec.role, spec.name): added.values[spec.name] for spec in added.specs}
    return {**found.adapter.token_parameters(found.trunk), **more}


def first_class_token(layout: TokenLayout) -> int | None:
    """Return the position of the first class token; None for layouts without one."""
    return next(iter(layout.indices(Role.CLASS)), None)


def all_entered(found: Found) -> int:
    """Return the first layer in which all tokens are present."""
    last = found.adapter.layout_in(found.trunk, -1)
    layers = range(len(found.blocks))
    first = next(layer for layer in layers if found.adapter.layout_in(found.trunk, layer) == last)
    added = added_to(found)
    return first if added is None else max(first, *(spec.enters for spec in added.specs))


def added_to(found: Found) -> SideTokens | None:
    """Return the tokens that `vitrail.add_tokens` added to a model, if any."""
    plan: Any = getattr(found.trunk, "_vitrail_plan", None)
    return None if plan is None else plan.added
