"""A training step: forward, backward, clipping, optimizer; captured as a CUDA graph where possible.

A step of a small model is a thousand kernels of a few microseconds, which Python launches more slowly than a GPU runs
them. On a single GPU the step is therefore captured once as a CUDA graph and replayed. Random numbers (drop path) still
depend on the seed that the loop sets before each step, and the learning rate is a tensor that is filled before it.
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
from vitrail.runtime.cuda_graph import WARMUP_STEPS, CudaGraph
from vitrail.training.config import Config
from vitrail.training.model import Built
from vitrail.training.objective.objective import Terms
from vitrail.training.optim.optimizer import set_lr
from vitrail.training.setup import Setup

Mixed = tuple[Tensor, Tensor]
Compute = Callable[..., list[Terms]]
Capture = Callable[[Compute, tuple[Tensor, ...]], Compute]

RECOMPILE_LIMIT = 16
"""How often torch.compile may compile one block; merged blocks need five graphs to train and four to evaluate."""


class Step:
    """Runs training steps; replays a captured one where possible.

    Args:
        setup: the setup of the run.
        capture: captures a function and its inputs, such as `CudaGraph`; None runs every step eagerly.
    """

    def __init__(self, setup: Setup, capture: Capture | None) -> None:
        self._setup = setup
        self._capture = capture
        self._captured: Compute | None = None
        self._warmup = 0
        self._r: Any = None
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]

    def __call__(self, images: Tensor, labels: Tensor, mixed: Mixed | None, lr: float) -> list[Terms]:
        """Run a step on this rank's part of a batch; return the losses of each accumulated part."""
        set_lr(self._setup.optimizer, lr)
        inputs = (images, labels, *(mixed or ()))
        if self._capture is None:
            return self._compute(*inputs)
        merging = self._setup.models.merging
        r = None if merging is None else tuple(merging.r)
        if r != self._r:  # other shapes
            self._r, self._warmup, self._captured = r, 0, None
        if self._captured is None and self._warmup >= WARMUP_STEPS:
            self._captured = self._try_capture(inputs)
        if self._captured is not None:
            return self._captured(*inputs)
        self._warmup += 1
        return self._compute_on_side_stream(inputs)

    def _try_capture(self, inputs: tuple[Tensor, ...]) -> Compute | None:
        """Capture a step without running it; fall back to eager steps if that fails."""
        assert self._capture is not None
        try:
            return self._capture(self._compute, inputs)
        except RuntimeError as error:
            self._capture = None
            self._setup.optimizer.zero_grad(set_to_none=True)
            why = str(error).strip().splitlines()[0]
            self._setup.note(f"The step cannot be captured as a CUDA graph and runs eagerly ({why}).")
            return None

    def _compute_on_side_stream(self, inputs: tuple[Tensor, ...]) -> list[Terms]:
        """Run a step on a side stream, as a capture does."""
        if inputs[0].device.type != "cuda":
            return self._compute(*inputs)
        current = torch.cuda.current_stream()
        self._side_stream.wait_stream(current)
        with torch.cuda.stream(self._side_stream):
            terms = self._compute(*inputs)
        current.wait_stream(self._side_stream)
        return terms

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _compute(self, images: Tensor, labels: Tensor, *mixed: Tensor) -> list[Terms]:
        setup, config = self._setup, self._setup.config
        count, size = config.accumulate, len(labels) // config.accumulate
        losses = []
        for part in range(count):
            rows = slice(part * size, (part + 1) * size)
            own = None
            if mixed:  # partners are neighbors, so they are among these rows
                partner, share = mixed
                own = partner[rows] - rows.start, share[rows]
            with _sync_gradients(setup.wrapped, last=part == count - 1):
                terms = self._forward(images[rows], labels[rows], own)
                (terms.total / count).backward()
            losses.append(Terms(terms.total.detach(), {name: one.detach() for name, one in terms.parts.items()}))
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, config.clip)
        setup.optimizer.step()
        setup.optimizer.zero_grad(set_to_none=True)
        return losses

    def _forward(self, images: Tensor, labels: Tensor, mixed: Mixed | None) -> Terms:
        setup = self._setup
        cached = self._capture is None  # a graph must not use weights that were cast outside of it
        with torch.autocast(images.device.type, torch.bfloat16, enabled=setup.config.half, cache_enabled=cached):
            taught = None if setup.models.teacher is None else setup.models.teacher(images)
            terms: Terms = setup.wrapped(images, labels, mixed, taught)
        return terms


def capture_for(setup: Setup) -> Capture | None:
    """Return what captures steps: CUDA graphs on a single GPU, unless disabled."""
    possible = setup.world.device.type == "cuda" and setup.world.world_size == 1
    return CudaGraph if possible and setup.config.graphs is not False else None


@contextmanager
def raised_recompile_limit(config: Config) -> Iterator[None]:
    """Raise torch.compile's recompile limit, which is eight by default, to `RECOMPILE_LIMIT`."""
    if config.compile in (None, "off"):
        yield
        return
    import torch._dynamo

    limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


@contextmanager
def safe_attention(built: Built) -> Iterator[None]:
    """Disable cuDNN attention while a model trains whose gradients it may turn into NaN.

    Vitrail models decide for each call; for other models it is on or off.
    """
    overflows = False
    if not isinstance(built.model, ViT):
        try:
            found = find(built.model)
            layout = found.adapter.layout(found.trunk, built.preprocessing.size or None)
            overflows = overflows_in_cudnn(layout.num_tokens)
        except VitrailError:
            overflows = True  # the number of tokens is unknown, as with window attention
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not overflows)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def _sync_gradients(wrapped: Any, *, last: bool) -> Iterator[None]:
    """Reduce gradients over ranks only with the last accumulated part."""
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
    with wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else nullcontext():
        yield
