"""Forms: ways to run a model, each turned into a step that can be timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.bench.config import BenchConfig
from vitrail.errors import UnsupportedInput

Call = Callable[[Tensor], Any]


@dataclass
class Runner:
    """A model in one form, ready to be stepped.

    Attributes:
        step: run inference, or one training step, on the batch of that number; gives the model's output or None.
        static: bytes that stay between steps: weights, buffers, and the optimizer's state.
        graph: the CUDA graph that a step replays, where it does.
    """

    step: Callable[[int], Any]
    static: Callable[[], int]
    graph: RecordedGraph | None = None


def prepare(config: BenchConfig, form: str, model: nn.Module, batches: Sequence[Tensor]) -> Runner:
    """Put a model into a form. Nothing runs yet: what has to be compiled or recorded is, in the first step."""
    if config.train:
        return _trainer(config, _callable(form, model, config.compile_mode), model, batches)
    return inference(form, model, batches, config.compile_mode, config.autocast_dtype)


def inference(
    form: str, model: nn.Module, batches: Sequence[Tensor], compile_mode: str, autocast: torch.dtype | None = None
) -> Runner:
    """Put a model into a form for inference, as it is or through ``torch.autocast``; nothing runs yet."""
    call = _in_dtype(autocast, _callable(form, model, compile_mode))
    graph = RecordedGraph(call) if "graph" in form else None
    run = graph or call

    @torch.inference_mode()
    def infer(index: int) -> Any:
        return run(batches[index])

    return Runner(infer, lambda: _bytes(model), graph)


@contextmanager
def compiling(cold: bool = False) -> Iterator[None]:
    """Let the compiler begin anew, from empty caches where it is to be cold; afterwards it forgets what it made."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()  # what was compiled before is not a cold start
    with ExitStack() as stack:
        # every block may have a shape of its own, and none may fall back to eager without a word
        limits = {"recompile_limit": 512, "accumulated_recompile_limit": 8192}
        stack.enter_context(torch._dynamo.config.patch(limits))
        if cold:
            stack.enter_context(fresh_cache())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32")
            yield
    torch._dynamo.reset()


def values_of(output: Any) -> Tensor:
    """Find the tensor in a model's output: itself, its class scores, pooled features or tokens."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "pooler_output", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise UnsupportedInput(
        f"the model gave a {type(output).__name__}; expected a tensor, or an output with logits, pooler_output or "
        "last_hidden_state"
    )


class RecordedGraph:
    """A call recorded as a CUDA graph at its first use and replayed afterwards.

    Inputs are copied to where the graph reads them; that belongs to the time of a step.

    Attributes:
        held: most bytes that were in use while it was recorded, beyond what was before; replays allocate nothing.
    """

    def __init__(self, call: Call, warm_steps: int = 3) -> None:
        self.call = call
        self.warm_steps = warm_steps
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None
        self.held = 0

    def __call__(self, batch: Tensor) -> Any:
        if self.graph is None:
            self._record(batch)
        assert self.graph is not None
        self.input.copy_(batch)
        self.graph.replay()
        return self.output

    def _record(self, batch: Tensor) -> None:
        self.input = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compilation and libraries' workspaces come before, outside of the graph
            for _ in range(self.warm_steps):
                self.call(self.input)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.output = self.call(self.input)
        self.held = torch.cuda.max_memory_allocated() - before
        self.graph = graph


def _callable(form: str, model: nn.Module, compile_mode: str) -> Call:
    mode = None if compile_mode == "default" else compile_mode
    if form.startswith("compiled"):
        return torch.compile(model, dynamic=False, mode=mode)
    if form.startswith("blocks"):
        for block in find(model).blocks:
            block.compile(dynamic=False, mode=mode)
    return model


def _in_dtype(dtype: torch.dtype | None, call: Call) -> Call:
    if dtype is None:
        return call

    def cast(batch: Tensor) -> Any:
        with _autocast(dtype, batch):
            return call(batch)

    return cast


def _autocast(dtype: torch.dtype | None, batch: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(batch.device.type, dtype)


def _trainer(config: BenchConfig, call: Call, model: nn.Module, batches: Sequence[Tensor]) -> Runner:
    model.train()
    fused = batches[0].is_cuda or None
    # the smallest of steps: weights must stay finite however long the measurement takes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)

    def train(index: int) -> None:
        batch = batches[index]
        with _autocast(config.autocast_dtype, batch):
            output = values_of(call(batch))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def static() -> int:
        state = [value for values in optimizer.state.values() for value in values.values()]
        return _bytes(model) + sum(value.nbytes for value in state if isinstance(value, Tensor))

    return Runner(train, static)


def _bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
