"""A pass: one forward run of a trunk, from the moment a picture enters it until tokens reach the first block.

A trunk's entry points open a pass in their thread; the first block reads it, and from there on everything
travels with the tokens, as the attribute ``CARRIER`` of their tensor. So two threads, two models, or a model called
from within itself never meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import Rotary
from vitrail.tokens import TokenLayout, TokenSpan

CARRIER = "_vitrail_carried"


@dataclass(frozen=True)
class Pass:
    """What the way in knows and the blocks need.

    Attributes:
        trunk: the model that is running; None where blocks run by themselves.
        layout: its tokens for the present input.
        rotary: its rotary position, where it has one.
        expose: whether somebody looks at the tokens between blocks, who must be shown the full length.
        gridded: whether they will be laid out as a grid.
        unmasked: whether nobody asked for a mask, so that one which allows everything may be ignored.
    """

    trunk: nn.Module | None
    layout: TokenLayout
    rotary: Rotary | None = None
    expose: bool = False
    gridded: bool = False
    unmasked: bool = False


class _Local(threading.local):
    current: Any = None


class _Traced:
    def __init__(self) -> None:
        self.current: Any = None


class Place:
    """Something that each thread has for itself, as the attribute ``current`` of what `here` gives.

    While the compiler follows a forward run it is elsewhere: it cannot look into thread-locals, and runs alone.
    """

    def __init__(self) -> None:
        self.local = _Local()
        self.traced = _Traced()

    def here(self) -> _Local | _Traced:
        """Give where it is now."""
        return self.traced if torch.compiler.is_compiling() else self.local


_pass = Place()


def current_pass() -> Pass | None:
    """Give the innermost pass that is open in this thread."""
    found: Pass | None = _pass.here().current
    return found


@contextmanager
def open_pass(
    trunk: nn.Module,
    layout: TokenLayout,
    rotary: Rotary | None = None,
    expose: bool = False,
    gridded: bool = False,
    unmasked: bool = False,
) -> Iterator[None]:
    """Mark the forward run inside as a pass of ``trunk``."""
    place = _pass.here()
    outer = place.current
    place.current = Pass(trunk, layout, rotary, expose, gridded, unmasked)
    try:
        yield
    finally:
        place.current = outer


def hand_over(before: Tensor, after: Tensor, places: Sequence[int], special: tuple[TokenSpan, ...]) -> None:
    """Have a tensor carry what another one does, after tokens were put in at these places of its special ones.

    Between blocks a trunk replaces the tensor; where nothing travels with it, there is nothing to do.
    """
    carried = getattr(before, CARRIER, None)
    if carried is not None:
        setattr(after, CARRIER, carried.with_tokens(places, special))
