"""Trace: where every patch went, recorded while a model runs inside ``merging.track()``; compiled ones run eagerly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption, NotApplied
from vitrail.merging import Assignment, MergeState
from vitrail.runtime.plan import Plan
from vitrail.tokens import TokenLayout


@dataclass(frozen=True)
class TracedPass:
    """One forward pass: its layout, and the state after its last block."""

    layout: TokenLayout
    state: MergeState
    batch: int
    device: torch.device
    flops: int | None = None
    """Multiply-adds, where the state does not tell."""

    @property
    def assignment(self) -> Assignment:
        """Where each original token is in the merged sequence."""
        if self.state.assignment is None:
            return Assignment.identity(self.batch, self.layout.num_tokens, self.device)
        return self.state.assignment


@dataclass
class Trace:
    """The record of :meth:`Merging.track`; the properties describe the latest pass.

    Attributes:
        passes: every forward pass that ran while tracking, in order.
    """

    plan: Plan = field(repr=False)
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
        """Index of the kept token that each patch went into: (B, patches), indices into the merged sequence.

        Where tokens are merged inside windows and restored, those of the last block that merged.
        """
        return self.latest.assignment.target[:, self.layout.patches]

    @property
    def sizes(self) -> Tensor:
        """Number of original tokens in each kept token (B, kept); 0 marks padding."""
        latest = self.latest
        if latest.state.size is None:
            return torch.ones(latest.batch, latest.layout.num_tokens, device=latest.device)
        return latest.state.size

    @property
    def tokens_per_layer(self) -> Tensor:
        """Number of tokens that leave each block, per image (B, layers); padding is not counted."""
        latest = self.latest
        if latest.state.lengths:
            return torch.stack(latest.state.lengths, 1)
        late = torch.tensor(self.plan.cost.late, device=latest.device)
        merged = torch.tensor(latest.state.per_layer, device=latest.device)
        merged = merged * 0 if self.plan.method.scope == "block" else merged.cumsum(0)
        return (self._tokens_at_start - merged + late).expand(latest.batch, -1)

    @property
    def flops(self) -> Tensor:
        """Multiply-adds of each image (B,), without its padding."""
        latest = self.latest
        if latest.flops is not None:
            return torch.full((latest.batch,), latest.flops)
        if self.plan.method.scope == "block":
            merges = torch.tensor(latest.state.per_layer).expand(latest.batch, -1)
        else:
            kept = self.tokens_per_layer.cpu() - torch.tensor(self.plan.cost.late)
            start = torch.full_like(kept[:, :1], self._tokens_at_start)
            if latest.state.present is not None:  # padding was never there
                start = start - (~latest.state.present).sum(1, keepdim=True).cpu()
            merges = -torch.diff(kept, dim=1, prepend=start)
        special = self._tokens_at_start - self.layout.num_patches
        starts = [self.layout.num_patches] * len(merges)
        if latest.state.present is not None:
            starts = (latest.state.present.sum(1) - self.layout.num_special).tolist()
        counts = zip(merges.tolist(), starts, strict=True)
        grid = self.layout.grid
        return torch.tensor([self.plan.counter(special, patches, grid)(per_layer) for per_layer, patches in counts])

    @property
    def _tokens_at_start(self) -> int:
        return self.layout.num_tokens - self.plan.cost.late[-1]

    def _repr_html_(self) -> str:
        from vitrail.runtime.trace_card import trace_card

        return trace_card(self)

    def unmerge(self, tokens: Tensor) -> Tensor:
        """Return a token for every original position: (B, kept, D) becomes (B, N, D)."""
        assignment = self.latest.assignment
        batch, length = assignment.target.shape
        if tokens.dim() != 3 or tokens.shape[:2] != (batch, assignment.length):
            full = " (those are full length already)" if tokens.shape[1:2] == (length,) else ""
            raise InvalidOption(
                f"unmerge takes the merged tokens of the latest pass, ({batch}, {assignment.length}, channels); "
                f"got {tuple(tokens.shape)}{full}"
            )
        return self.latest.state.unmerge(tokens, self.plan.method)


class _Active(threading.local):
    def __init__(self) -> None:
        self.traces: list[Trace] = []


_active = _Active()


@contextmanager
def tracking(plan: Plan) -> Iterator[Trace]:
    """Record the passes of this thread through blocks of ``plan``.

    Compiled models run eagerly meanwhile, since a trace stores values outside any graph.
    """
    trace = Trace(plan)
    _active.traces.append(trace)
    try:
        with eagerly():
            yield trace
    finally:
        _active.traces = [other for other in _active.traces if other is not trace]


def record(plan: Plan, traced: TracedPass) -> None:
    """Add a finished pass to the traces of this thread."""
    for trace in _active.traces:
        if trace.plan is plan:
            trace.passes.append(traced)


def update(plan: Plan, change: Callable[[TracedPass], TracedPass]) -> None:
    """Change the latest pass in the traces of this thread."""
    for trace in _active.traces:
        if trace.plan is plan and trace.passes:
            trace.passes[-1] = change(trace.passes[-1])


def is_tracking() -> bool:
    """Return whether any trace is recording in this thread."""
    return bool(_active.traces)


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models eagerly inside a ``with`` block, in all threads, without recompiling them afterwards."""
    _change_users(1)
    try:
        yield
    finally:
        _change_users(-1)


_lock = threading.Lock()
_count = 0
_stance: Any = None


def _change_users(change: int) -> None:
    """Count users over all threads; the first disables compiled code, and the last enables it again."""
    global _count, _stance
    with _lock:
        _count += change
        if _count == 1 and change == 1 and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        elif _count == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
