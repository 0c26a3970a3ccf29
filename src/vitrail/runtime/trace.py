"""Trace: where every patch went, kept only while somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.errors import InvalidOption, NotApplied
from vitrail.merging import Assignment, MergeState
from vitrail.runtime.eager import eagerly
from vitrail.tokens import TokenLayout


@dataclass(frozen=True)
class TracedPass:
    """One forward pass: its layout, and the state after its last block."""

    layout: TokenLayout
    state: MergeState
    batch: int
    device: torch.device

    @property
    def assignment(self) -> Assignment:
        """Where each original token is in the merged sequence."""
        if self.state.assignment is None:
            return Assignment.identity(self.batch, self.layout.num_tokens, self.device)
        return self.state.assignment


@dataclass
class Trace:
    """What :meth:`Merging.track` collects; the properties speak of the latest pass.

    Attributes:
        passes: every forward pass that ran while tracking, in order.
    """

    passes: list[TracedPass] = field(default_factory=list)

    @property
    def latest(self) -> TracedPass:
        """The latest pass."""
        if not self.passes:
            raise NotApplied("nothing was tracked: call the model inside `with merging.track() as trace:`")
        return self.passes[-1]

    @property
    def layout(self) -> TokenLayout:
        """The tokens before any merge."""
        return self.latest.layout

    @property
    def groups(self) -> Tensor:
        """Which kept token each patch went into: (B, patches), indices into the merged sequence."""
        return self.latest.assignment.target[:, self.layout.patches]

    @property
    def sizes(self) -> Tensor:
        """How many original tokens each kept token holds: (B, kept)."""
        latest = self.latest
        if latest.state.size is None:
            return torch.ones(latest.batch, latest.layout.num_tokens, device=latest.device)
        return latest.state.size

    def unmerge(self, tokens: Tensor) -> Tensor:
        """Give every original position its token: (B, kept, D) becomes (B, N, D)."""
        assignment = self.latest.assignment
        batch, length = assignment.target.shape
        if tokens.dim() != 3 or tokens.shape[:2] != (batch, assignment.length):
            full = " (those are full length already)" if tokens.shape[1:2] == (length,) else ""
            raise InvalidOption(
                f"unmerge takes the merged tokens of the latest pass, ({batch}, {assignment.length}, channels); "
                f"got {tuple(tokens.shape)}{full}"
            )
        return assignment.unmerge(tokens)


class _Active(threading.local):
    def __init__(self) -> None:
        self.traces: list[tuple[object, Trace]] = []


_active = _Active()


@contextmanager
def tracking(plan: object) -> Iterator[Trace]:
    """Collect the passes of this thread through blocks of ``plan``.

    Compiled models run eagerly meanwhile: what a trace keeps lives outside of any graph.
    """
    trace = Trace()
    _active.traces.append((plan, trace))
    try:
        with eagerly():
            yield trace
    finally:
        _active.traces.remove((plan, trace))


def record(plan: object, traced: TracedPass) -> None:
    """Hand a finished pass to whoever tracks in this thread."""
    for wanted, trace in _active.traces:
        if wanted is plan:
            trace.passes.append(traced)


def is_tracking() -> bool:
    """Whether anybody tracks in this thread."""
    return bool(_active.traces)
