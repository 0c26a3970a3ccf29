"""A training step: forward, backward, clipping, optimizer; captured as a CUDA graph where possible.

A step of a small model is a thousand kernels of a few microseconds, which Python launches more slowly than a GPU runs
them. On a single GPU the step is therefore captured once as a CUDA graph and replayed. Random numbers (drop path) still
depend on the seed that the loop sets before each step, and the learning rate is a tensor that is filled before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vitrail._distributed import World
from vitrail.adapters import find
from vitrail.errors import VitrailError
from vitrail.merging.attention import overflows_in_cudnn
from vitrail.merging.methods.learned import LearnedMethod
from vitrail.models import ViT
from vitrail.runtime.cuda_graphs.graph import WARMUP_STEPS, CudaGraph
from vitrail.training.config import Config
from vitrail.training.model import Built, Models
from vitrail.training.objective.objective import Terms
from vitrail.training.optim.optimizer import set_lr

Mixed = tuple[Tensor, Tensor]
Compute = Callable[..., list[Terms]]
Capture = Callable[[Compute, tuple[Tensor, ...]], Compute]

RECOMPILE_LIMIT = 16
"""How often torch.compile may compile one block; merged blocks need five graphs to train and four to evaluate."""


class Step:
    """Runs training steps; replays a captured one where possible.

    ``capture`` captures a function and its inputs, as `CudaGraph` does; None runs every step eagerly. ``note`` reports
    a message. ``after_backward`` is called when the gradients of a step are complete and not yet clipped; it must not
    wait for the device.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        capture: Capture | None,
        note: Callable[[str], None],
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._models, self._wrapped, self._optimizer = config, models, wrapped, optimizer
        self._capture, self._note, self._after_backward = capture, note, after_backward
        self._captured: Compute | None = None
        self._warmup = 0
        self._r: Any = None
        self._side_stream = torch.cuda.Stream() if capture is CudaGraph else None
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, images: Tensor, labels: Tensor, mixed: Mixed | None, lr: float) -> list[Terms]:
        """Run a step on this rank's part of a batch; return the losses of each accumulated part."""
        set_lr(self._optimizer, lr)
        inputs = (images, labels, *(mixed or ()))
        if self._capture is None:
            return self._compute(*inputs)
        merging = self._models.merging
        r = tuple(merging.r) if merging is not None and self._models.final_r else None
        if r != self._r:  # other shapes
            self._r, self._warmup, self._captured = r, 0, None
        if self._captured is None and self._warmup >= WARMUP_STEPS:
            try:  # does not run the step
                self._captured = self._capture(self._compute, inputs)
            except RuntimeError as error:
                self._capture = None
                self._optimizer.zero_grad(set_to_none=True)
                why = str(error).strip().splitlines()[0]
                self._note(f"The step cannot be captured as a CUDA graph and runs eagerly ({why}).")
        if self._captured is not None:
            return self._captured(*inputs)
        self._warmup += 1
        if self._side_stream is None:
            return self._compute(*inputs)
        current = torch.cuda.current_stream()  # CUDA graphs require that steps before the capture use another one
        self._side_stream.wait_stream(current)
        with torch.cuda.stream(self._side_stream):
            terms = self._compute(*inputs)
        current.wait_stream(self._side_stream)
        return terms

    def _compute(self, images: Tensor, labels: Tensor, *mixed: Tensor) -> list[Terms]:
        config = self._config
        count, size = config.accumulate, len(labels) // config.accumulate
        teacher = self._models.teacher
        cached = self._capture is None  # a graph must not use weights that were cast outside of it
        losses = []
        for part in range(count):
            rows = slice(part * size, (part + 1) * size)
            x, own = images[rows], None
            if mixed:  # partners are neighbors, so they are among these rows
                partner, share = mixed
                own = partner[rows] - rows.start, share[rows]
            with _sync_gradients(self._wrapped, last=part == count - 1):
                with torch.autocast(x.device.type, torch.bfloat16, enabled=config.half, cache_enabled=cached):
                    terms: Terms = self._wrapped(x, labels[rows], own, None if teacher is None else teacher(x))
                (terms.total / count).backward()
            losses.append(Terms(terms.total.detach(), {name: one.detach() for name, one in terms.parts.items()}))
        self._after_backward()
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return losses


def capture_for(config: Config, world: World) -> Capture | None:
    """Return what captures steps: CUDA graphs on a single GPU, unless disabled."""
    possible = world.device.type == "cuda" and world.world_size == 1
    return CudaGraph if possible and config.graphs is not False else None


def raised_recompile_limit(config: Config, models: Models) -> AbstractContextManager[None]:
    """Return a context that raises torch.compile's recompile limit, which is eight by default, to `RECOMPILE_LIMIT`.

    With a learned method no two blocks share a graph, since each has parameters of its own in the method.
    """
    if config.compile in (None, "off"):
        return nullcontext()
    import torch._dynamo

    merging = models.merging
    depth = len(merging.found.blocks) if merging is not None and isinstance(merging.method, LearnedMethod) else 1
    limit = max(RECOMPILE_LIMIT * depth, torch._dynamo.config.recompile_limit)
    return torch._dynamo.config.patch(recompile_limit=limit)


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


def _sync_gradients(wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context in which gradients are reduced over ranks only with the last accumulated part."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext()
