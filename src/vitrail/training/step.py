"""One step of training: the gradients of a batch, clipped, and the optimiser's move.

A small model's step is a thousand kernels of some microseconds each, and Python takes longer to launch them than a GPU
to run them. Where one process trains on a GPU the step is therefore recorded once, as a CUDA graph, and replayed: the
same kernels on the same memory, launched all at once. What a step draws at random (drop path) still depends on the seed
that the loop sets before it, and the learning rate is a tensor that is filled before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vitrail.adapters import find
from vitrail.errors import VitrailError
from vitrail.merging.attention import overflows_in_cudnn
from vitrail.models import ViT
from vitrail.training.config.config import Config
from vitrail.training.log import Event
from vitrail.training.model import Built
from vitrail.training.objective.objective import Terms
from vitrail.training.objective.teacher import Taught
from vitrail.training.optim.optimizer import set_lr
from vitrail.training.parts import Parts

Mixed = tuple[Tensor, Tensor]
Recorder = Callable[[Callable[..., list[Terms]], tuple[Tensor, ...]], Callable[..., list[Terms]]]

WARM_UP = 3
"""Steps that are run as they are before one is recorded: compilers and libraries settle in these."""

GRAPHS = 16
"""How often one piece of a model may be compiled, each time for other shapes or another purpose."""


class Recorded:
    """A function of tensors as a CUDA graph. Every call gives the same tensors, with new values in them."""

    def __init__(self, function: Callable[..., list[Terms]], given: tuple[Tensor, ...]) -> None:
        self._given = tuple(torch.empty_like(one) for one in given)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile: those that read pictures pin memory, which a recording forbids.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = function(*self._given)

    def __call__(self, *given: Tensor) -> list[Terms]:
        for mine, theirs in zip(self._given, given, strict=True):
            mine.copy_(theirs)
        self._graph.replay()
        return self._result


class Step:
    """Computes steps, one call each; replays a recorded one where that is possible.

    Args:
        parts: what the run is made of.
        recorder: what makes a recording of a function and the tensors that it is called with; None to run each step
            as it is.
    """

    def __init__(self, parts: Parts, recorder: Recorder | None) -> None:
        self._parts = parts
        self._recorder = recorder
        self._recorded: Callable[..., list[Terms]] | None = None
        self._run = 0
        self._r: Any = None
        self._parameters = [p for group in parts.optimizer.param_groups for p in group["params"]]

    def __call__(self, images: Tensor, labels: Tensor, mixed: Mixed | None, lr: float) -> list[Terms]:
        """Take a step on this process's part of a batch; give the losses of each part that it was computed in."""
        set_lr(self._parts.optimizer, lr)
        given = (images, labels, *(mixed or ()))
        if self._recorder is None:
            return self._compute(*given)
        r = None if self._parts.merging is None else tuple(self._parts.merging.r)
        if r != self._r:  # other shapes, and other kernels
            self._r, self._run, self._recorded = r, 0, None
        if self._recorded is None and self._run >= WARM_UP:
            self._recorded = self._record(given)
        if self._recorded is not None:
            return self._recorded(*given)
        self._run += 1
        return self._aside(given)

    def _record(self, given: tuple[Tensor, ...]) -> Callable[..., list[Terms]] | None:
        """Record a step, which does not run it. What cannot be recorded is run as it is from now on."""
        assert self._recorder is not None
        try:
            return self._recorder(self._compute, given)
        except RuntimeError as error:
            self._recorder = None
            self._parts.optimizer.zero_grad(set_to_none=True)
            why = str(error).strip().splitlines()[0]
            text = f"A step of this model cannot be recorded as a CUDA graph, and runs as it is ({why})."
            self._parts.tell(Event("note", text=text))
            return None

    def _aside(self, given: tuple[Tensor, ...]) -> list[Terms]:
        """Run a step on a stream of its own, as recording does, so that nothing is tied to the usual one."""
        if given[0].device.type != "cuda":
            return self._compute(*given)
        usual = torch.cuda.current_stream()
        self._own.wait_stream(usual)
        with torch.cuda.stream(self._own):
            terms = self._compute(*given)
        usual.wait_stream(self._own)
        return terms

    @cached_property
    def _own(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _compute(self, images: Tensor, labels: Tensor, *mixed: Tensor) -> list[Terms]:
        parts, config = self._parts, self._parts.config
        count, size = config.accumulate, len(labels) // config.accumulate
        found = []
        for part in range(count):
            rows = slice(part * size, (part + 1) * size)
            with _syncing(parts.wrapped, last=part == count - 1):
                terms = self._forward(images[rows], labels[rows], _some(mixed, rows))
                (terms.total / count).backward()
            found.append(Terms(terms.total.detach(), {name: one.detach() for name, one in terms.parts.items()}))
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, config.clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        return found

    def _forward(self, images: Tensor, labels: Tensor, mixed: Mixed | None) -> Terms:
        half = self._parts.config.half
        # Halved weights that were kept from outside of a recording would never change in it.
        kept = self._recorder is None
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half, cache_enabled=kept):
            taught: Taught | None = None if self._parts.teacher is None else self._parts.teacher(images)
            terms: Terms = self._parts.wrapped(images, labels, mixed, taught)
        return terms


def recorder_for(parts: Parts) -> Recorder | None:
    """Say what records steps: CUDA graphs where one process trains on a GPU, unless nobody wants them."""
    possible = parts.crew.device.type == "cuda" and parts.crew.world == 1
    return Recorded if possible and parts.config.graphs is not False else None


@contextmanager
def room_for_graphs(config: Config) -> Iterator[None]:
    """Let PyTorch compile a block as often as there are kinds of calls; by default it gives up after eight.

    The blocks of a merged model, of any depth, are compiled five times to learn and four times to evaluate.
    """
    if config.compile in (None, "off"):
        yield
        return
    import torch._dynamo

    limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


@contextmanager
def sound_attention(built: Built) -> Iterator[None]:
    """Turn cuDNN's attention off in this process while a model trains whose gradients it may make NaN.

    Models of ours look after themselves, call by call; for others it is on or off.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and (isinstance(built.model, ViT) or not _may_overflow(built)))
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _may_overflow(built: Built) -> bool:
    size = built.preprocessing.size or None
    try:
        found = find(built.model)
        return overflows_in_cudnn(found.adapter.layout(found.trunk, size).num_tokens)
    except VitrailError:
        return True  # attention in windows, maybe, of nobody knows how many tokens


@contextmanager
def _syncing(wrapped: Any, *, last: bool) -> Iterator[None]:
    """Let processes add up their gradients with the last part of a batch, once."""
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
    with wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else nullcontext():
        yield


def _some(mixed: tuple[Tensor, ...], rows: slice) -> Mixed | None:
    """Give the partners and shares of some rows; pairs are neighbours, so partners are among them."""
    if not mixed:
        return None
    partner, share = mixed
    return partner[rows] - rows.start, share[rows]
