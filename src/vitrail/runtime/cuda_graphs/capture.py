"""``vitrail.capture``: a model that runs from CUDA graphs, for small batches without ``torch.compile``.

Below some batch size a GPU waits for Python to launch its kernels, and fewer tokens save nothing. A CUDA graph launches
all of them at once, but it has one shape, one place for its input and its result, and the weights that it was recorded
with. `CapturedModel` hides all of that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail import kernels
from vitrail._arguments import checked
from vitrail._checks import as_tuple, is_int
from vitrail.adapters.outputs import map_tensors
from vitrail.adapters.registry import declared_spec
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.runtime.checks import merged_trunk
from vitrail.runtime.cuda_graphs.graph import GraphPool, is_capturing
from vitrail.runtime.cuda_graphs.module_state import ModuleState
from vitrail.runtime.guide import is_guiding
from vitrail.runtime.trace import is_tracking

BATCH_SIZES = (1, 8, 32)

Shape = tuple[int, ...]
"""Shape of one input, without the batch: (C, H, W)."""


@checked
def capture(
    model: nn.Module, batch_sizes: int | Sequence[int] = BATCH_SIZES, sizes: int | Sequence[int | Shape] | None = None
) -> CapturedModel:
    """Record a model as CUDA graphs; return a function that runs it from these, like the model in inference.

    >>> fast = vitrail.capture(model, batch_sizes=(1, 8, 32))  # doctest: +SKIP
    >>> logits = fast(images)                                  # doctest: +SKIP

    A batch is padded up to the next recorded size, and a larger one runs in pieces. Inputs of other shapes or dtypes,
    calls with further arguments, and calls with hooks, traces or guides run the model itself. On a CPU every call does.

    Args:
        model: any model in eval mode, merged or not, on its device, compiled or not.
        batch_sizes: batch sizes to record.
        sizes: input sizes to record: pixels, (height, width), or whole shapes such as (C, T, H, W); by default the
            model's own.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model, a torch.nn.Module; got {type(model).__name__}")
    counts = as_tuple(batch_sizes)
    if not counts or not all(is_int(count, 1) for count in counts):
        raise InvalidOption(f"batch_sizes={batch_sizes!r}: expected one or more whole numbers, 1 or more")
    if any(part.training for part in model.modules()):
        raise InvalidOption("the model is in training mode; call model.eval() before vitrail.capture")
    return CapturedModel(model, tuple(sorted(set(counts))), tuple(_shapes(model, sizes)))


def _shapes(model: nn.Module, sizes: int | Sequence[int | Shape] | None) -> Iterator[Shape]:
    """Yield the shape of one input for each size."""
    spec = declared_spec(model)
    if sizes is None:
        if spec is None:
            raise InvalidOption(f"the input size of {type(model).__name__} is unknown; pass sizes=[(C, H, W)]")
        yield spec.shape
        return
    for size in as_tuple(sizes):
        sides = as_tuple(size)
        if not all(is_int(side, 1) for side in sides) or (len(sides) < 3 and spec is None):
            raise InvalidOption(f"sizes={sizes!r}: expected pixels, (height, width), or a shape such as (C, H, W)")
        if len(sides) > 2 or spec is None:
            yield sides
        else:
            yield (*spec.shape[:-2], sides[0], sides[-1])


class Recorded(NamedTuple):
    """A model recorded for one shape: its input, the graph, and the batch axis of each tensor of the output.

    Where a tensor has no batch axis (None), only whole batches of the recorded size can run.
    """

    images: Tensor
    graph: Callable[[], Any]
    axes: list[int | None]

    def run(self, images: Tensor) -> Any:
        """Return a copy of the output for a batch of at most the recorded size."""
        count = len(images)
        self.images[:count].copy_(images)
        axes = iter(self.axes)
        return map_tensors(lambda value: _first(value, next(axes), count).clone(), self.graph())


EAGER, CHANGED = object(), object()
"""Results of `Recordings.run` where there is no output: the model itself has to run, or is not the recorded one."""


class Recordings(NamedTuple):
    """The graphs of a model in some state, by shape and batch size; none where it runs on a CPU."""

    pool: GraphPool | None
    state: ModuleState
    graphs: dict[Shape, dict[int, Recorded]]

    def run(self, images: Tensor) -> Any:
        """Return the output for a batch, which may take several graphs; EAGER or CHANGED where there is none."""
        pieces = self._pieces(images)
        if not pieces or self.pool is None:
            return EAGER
        with self.pool.turn():
            outputs = [recorded.run(part) for recorded, part in pieces]
        if self.state.is_paused:
            return EAGER
        if not self.state.holds:
            return CHANGED
        if len(outputs) == 1:
            return outputs[0]
        axes = iter(pieces[0][0].axes)
        return map_tensors(lambda *parts: torch.cat(parts, next(axes) or 0), *outputs)

    def _pieces(self, images: Tensor) -> list[tuple[Recorded, Tensor]]:
        """Return the graphs that run a batch, each with its part of it."""
        by_count = self.graphs.get(tuple(images.shape[1:]))
        if by_count is None:
            return []
        largest = by_count[max(by_count)]
        if images.dtype != largest.images.dtype or images.device != largest.images.device:
            return []
        if None in largest.axes:
            return [(by_count[len(images)], images)] if len(images) in by_count else []
        return [
            (by_count[min(count for count in by_count if count >= len(part))], part)
            for part in images.split(max(by_count))
        ]


class CapturedModel:
    """A model that runs from CUDA graphs, one for each recorded shape; made by `capture`.

    Calls return copies without gradients, and may come from several threads and streams: they run one after the other.
    Weights may change in place; graphs are recorded anew when weights are replaced, and when merging is changed,
    applied or removed. Call :meth:`refresh` after other changes to the model.

    Attributes:
        model: the model itself.
        batch_sizes: the recorded batch sizes, ascending.
        input_shapes: the recorded shapes of one input.
    """

    def __init__(self, model: nn.Module, batch_sizes: tuple[int, ...], input_shapes: tuple[Shape, ...]) -> None:
        self.model, self.batch_sizes, self.input_shapes = model, batch_sizes, input_shapes
        self._setting, self._lock = _setting(_device(model)), threading.Lock()
        self.refresh()

    @property
    def is_recorded(self) -> bool:
        """Whether there are graphs; False on a CPU, where each call runs the model itself."""
        return bool(self._recordings.graphs)

    def __repr__(self) -> str:
        shapes = ", ".join(" × ".join(map(str, shape)) for shape in self.input_shapes)
        how = f"batches of {', '.join(map(str, self.batch_sizes))}" if self.is_recorded else "not recorded"
        return f"CapturedModel({type(self.model).__name__}, {shapes}, {how})"

    def __reduce__(self) -> tuple[Any, ...]:
        return capture, (self.model, self.batch_sizes, self.input_shapes)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch; calls with other arguments than one tensor run the model itself."""
        if len(args) == 1 and not kwargs and self._fits(args[0]):
            output = self._run(args[0])
            if output is not EAGER:
                return output
        return self.model(*args, **kwargs)

    def refresh(self) -> None:
        """Record all graphs anew."""
        self._recordings = Recordings(None, ModuleState(self.model), {})  # frees the memory of the others
        device = _device(self.model)
        if not _records(device):
            return
        _refuse_unrecordable(self.model)
        pool, state = GraphPool(device), self._recordings.state
        graphs: dict[Shape, dict[int, Recorded]] = {shape: {} for shape in self.input_shapes}
        with torch.inference_mode(False), torch.no_grad():
            for count, shape in product(sorted(self.batch_sizes, reverse=True), self.input_shapes):
                graphs[shape][count] = self._record(pool, count, shape)
        self._recordings = Recordings(pool, state, graphs)

    def _record(self, pool: GraphPool, count: int, shape: Shape) -> Recorded:
        weight = next(part for part in self.model.parameters() if part.is_floating_point())
        images = torch.zeros(count, *shape, dtype=weight.dtype, device=weight.device)
        try:
            other = self._forward(images[:-1] if count > 1 else torch.cat([images, images]))
            output, graph = pool.record(partial(self._forward, images))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0]
            raise UnsupportedModel(
                f"{type(self.model).__name__} cannot be recorded as a CUDA graph ({why}); call the model itself"
            ) from error
        axes: list[int | None] = []
        map_tensors(lambda one, two: axes.append(_batch_axis(one, two)), output, other)
        return Recorded(images, graph, axes)

    def _forward(self, images: Tensor) -> Any:
        """Run the model; with autocast, weights are cast in the graph, which follows them then."""
        dtype = self._setting.autocast
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return self.model(images)

    def _fits(self, images: Any) -> bool:
        """Return whether a graph is recorded for this input, and the model would do now what it did then."""
        return (
            isinstance(images, Tensor)
            and self.is_recorded
            and images.dim() > 1
            and len(images) > 0
            and not torch.compiler.is_compiling()
            and not is_capturing()
            and _setting(images.device) == self._setting
            and not is_tracking()
            and not is_guiding()
        )

    def _run(self, images: Tensor) -> Any:
        """Return the output of the graphs for a batch; EAGER where the model itself has to run.

        The model is compared with the recorded one while the device works, and recorded anew if it has changed.
        """
        while (output := self._recordings.run(images)) is CHANGED:
            with self._lock:
                if not self._recordings.state.holds:
                    self.refresh()
        return output


class Setting(NamedTuple):
    """What besides its input decides how a model runs: autocast's dtype, and whether the reference is forced."""

    autocast: torch.dtype | None
    reference: bool


def _setting(device: torch.device) -> Setting:
    enabled = torch.is_autocast_enabled(device.type)
    return Setting(torch.get_autocast_dtype(device.type) if enabled else None, kernels.is_reference())


def _device(model: nn.Module) -> torch.device:
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def _records(device: torch.device) -> bool:
    """Return whether models on a device run from graphs."""
    return device.type == "cuda"


def _refuse_unrecordable(model: nn.Module) -> None:
    trunk: Any = merged_trunk(model)
    if trunk is not None and trunk._vitrail_plan.images_decide:
        raise UnsupportedInput(
            "here the number of tokens depends on the images, which a CUDA graph cannot follow; use a static method "
            "and order='paper', or call the model itself"
        )


def _batch_axis(one: Tensor, two: Tensor) -> int | None:
    """Return the axis in which two outputs differ, for batches of two sizes; None if there is not exactly one."""
    if one.dim() != two.dim():
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return axes[0] if len(axes) == 1 else None


def _first(value: Tensor, axis: int | None, count: int) -> Tensor:
    return value if axis is None else value.narrow(axis, 0, count)
