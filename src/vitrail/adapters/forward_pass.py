"""A forward pass of a trunk, from its entry point to its first block.

A trunk's entry points open a pass in their thread; the first block reads it, and from there on the state travels with
the tokens, as the attribute ``CARRIER`` of their tensor. So two threads, two models, or a model called from within
itself share nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.position import Position
from vitrail.tokens import TokenLayout, TokenSpan

CARRIER = "_vitrail_carried"

Grid = tuple[int, int, int]

Exposed = bool | frozenset[int]
"""Whether the tokens between blocks are seen: all, none, or those behind the blocks of these indices."""


@dataclass(frozen=True)
class Segments:
    """Segments of a packed sequence that have the same layout, and so make a batch.

    Attributes:
        layout: the tokens of one segment.
        places: where each token is in the packed sequence (B, N), in the order of the layout.
        position: position inside attention.
        inputs: computes the images of the segments, as `Method.maps` reads them.
        whole: tokens of the image that each segment is a window of; None where segments are whole images.
        owners: index of that image, for each segment; windows of one image are neighbors.
    """

    layout: TokenLayout
    places: Tensor
    position: Position | None = None
    inputs: Callable[[], Tensor] | None = None
    whole: TokenLayout | None = None
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pass:
    """The information that an entry point passes to the blocks.

    Attributes:
        trunk: the model that is running; None where blocks run by themselves.
        layout, position: its tokens for the present input, and the position inside attention, where there is one.
        expose: whether the caller sees the tokens between blocks, or behind some blocks, and so must get them at full
            length.
        gridded: whether they are reshaped to the patch grid.
        unmasked: whether the caller passed no mask, so that an all-true mask is ignored.
        inputs: the images, clips or spectrograms that the trunk was called with, as `Method.maps` reads them.
        segments: batches of a packed sequence, whose tokens have no batch axis (N, D); None for ordinary tokens.
        together: layers in which the windows of an image attend to each other.
        whole: tokens of the image, where those of the layout are a window of it and share its schedule.
        grids: patch grid of each image of a batch that is padded behind; None where every patch of the layout is there.
    """

    trunk: nn.Module | None
    layout: TokenLayout
    position: Position | None = None
    expose: Exposed = False
    gridded: bool = False
    unmasked: bool = False
    inputs: Tensor | Callable[[], Tensor] | None = None
    segments: tuple[Segments, ...] | None = None
    grids: tuple[Grid, ...] | None = None
    together: frozenset[int] = frozenset()
    whole: TokenLayout | None = None


class _Local(threading.local):
    current: Any = None


class _Traced:
    def __init__(self) -> None:
        self.current: Any = None


class Place:
    """A value of each thread, as the attribute ``current`` of what `here` returns.

    While the compiler traces, the value is kept elsewhere: tracing cannot read thread-locals, and runs alone.
    """

    def __init__(self) -> None:
        self.local = _Local()
        self.traced = _Traced()

    def here(self) -> _Local | _Traced:
        """Return where the value is kept now."""
        return self.traced if torch.compiler.is_compiling() else self.local

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Keep a value inside a ``with`` block, also for models in it that are compiled on their own."""
        places: list[Any] = [self.traced] if torch.compiler.is_compiling() else [self.local, self.traced]
        outer = [place.current for place in places]
        for place in places:
            place.current = value
        try:
            yield
        finally:
            for place, before in zip(places, outer, strict=True):
                place.current = before


_pass = Place()


_running: Counter[int] = Counter()
_counting = threading.Lock()


def count(trunk: nn.Module, change: int) -> None:
    """Count the passes that run in all threads, by trunk. A compiled pass is one call, and is not counted."""
    if torch.compiler.is_compiling():
        return
    with _counting:
        _running[id(trunk)] += change
        if not _running[id(trunk)]:
            del _running[id(trunk)]


def is_running(trunk: nn.Module) -> bool:
    """Return whether a pass of a trunk runs now, in any thread: its blocks must not change meanwhile."""
    return id(trunk) in _running


def current_pass() -> Pass | None:
    """Return the innermost pass that is open in this thread."""
    found: Pass | None = _pass.here().current
    return found


@contextmanager
def open_pass(
    trunk: nn.Module,
    layout: TokenLayout,
    position: Position | None = None,
    expose: Exposed = False,
    gridded: bool = False,
    unmasked: bool = False,
    inputs: Tensor | Callable[[], Tensor] | None = None,
    segments: tuple[Segments, ...] | None = None,
    grids: tuple[Grid, ...] | None = None,
    together: frozenset[int] = frozenset(),
) -> Iterator[None]:
    """Mark the forward run inside as a pass of ``trunk``."""
    place = _pass.here()
    outer = place.current
    place.current = Pass(trunk, layout, position, expose, gridded, unmasked, inputs, segments, grids, together)
    count(trunk, 1)
    try:
        yield
    finally:
        count(trunk, -1)
        place.current = outer


def hand_over(before: Tensor, after: Tensor, places: Sequence[int], special: tuple[TokenSpan, ...]) -> None:
    """Copy the state from one tensor to another that has more special tokens, entered at these places.

    Between blocks a trunk replaces the tensor; without a state, do nothing.
    """
    carried = getattr(before, CARRIER, None)
    if carried is not None:
        setattr(after, CARRIER, carried.with_tokens(places, special))


class EntryPoint:
    """What the entry points of a trunk share; its methods, named as the trunk's own, open a pass around these."""

    def _vitrail_pass(self: Any, x: Tensor, **options: bool) -> AbstractContextManager[None]:
        """Open a pass with the layout and position of an input; options as for `open_pass`."""
        adapter = self._vitrail_adapter
        x = adapter.channels_first(self, x)
        layout = adapter.layout(self, tuple(x.shape[2:]))
        return open_pass(self, layout, adapter.position(self, layout.grid), inputs=x, **options)  # type: ignore[arg-type]


class FeaturesEntry(EntryPoint):
    """Entry point ``forward_features``, with the input as its first argument."""

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._vitrail_pass(x):
            return super().forward_features(x, *args, **kwargs)  # type: ignore[misc]


class IntermediatesEntry(EntryPoint):
    """Entry point ``forward_intermediates`` of timm and open_clip; its outputs are a grid unless ``NLC`` is named."""

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        gridded = kwargs.get("output_fmt", args[4] if len(args) > 4 else "NCHW") == "NCHW"
        with self._vitrail_pass(x, expose=True, gridded=gridded):
            return super().forward_intermediates(x, *args, **kwargs)  # type: ignore[misc]


class ForwardEntry(EntryPoint):
    """Entry point of a trunk whose only one is ``forward``, with the input as its first argument."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._vitrail_pass(args[0] if args else kwargs[self._vitrail_adapter.argument]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
