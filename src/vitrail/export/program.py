"""From a model to a program: plain outputs, and no traces of this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrail.adapters.saved import class_names
from vitrail.errors import ExportError, VitrailError, VitrailWarning
from vitrail.export.base import first_line
from vitrail.heads import Output

if TYPE_CHECKING:
    from vitrail.training.objective.targets import Target


class Plain(nn.Module):
    """A model that takes one tensor and gives tensors: one as it is, several by name.

    Programs made from it load where the model's library is not installed: its own output classes are gone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._shared = _questions(model)
        self.eval()  # the model is in this mode already

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        outputs = self.outputs(images)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Give the outputs by name; where one head answers several tasks, each task's part by the task's name."""
        said = self.model(images)
        if isinstance(said, Tensor) and self._shared:
            return {one.name: one.read(said) for one in self._shared}
        return named_tensors(said)


def _questions(model: nn.Module) -> tuple[Target, ...]:
    """Say what a model answers, where training taught it several things."""
    names = class_names(model)
    if len(names) < 2:
        return ()
    from vitrail.training.objective.targets import assign_targets

    return assign_targets(model, names)


def named_tensors(result: Any) -> dict[str, Tensor]:
    """Give the tensors of a model's output by name; ``output`` for a bare one."""
    tensors = dict(_walk(result, ""))
    if not tensors:
        raise ExportError(
            f"the model gave a {type(result).__name__}. Expected a tensor, or a dict or tuple of tensors; wrap the "
            "model in a module that returns what is wanted"
        )
    return tensors


def _walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Output):  # what our models with tasks give: answers, and features that are not exported
        yield from _walk({"logits": value.logits, **value.by_role}, name)
    elif isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _walk(part, f"{name or 'output'}_{index}")


def trace(model: Plain, images: Tensor, dynamic: bool) -> torch.export.ExportedProgram:
    """Turn a model into a program for inputs like ``images``, with any number of pictures if ``dynamic``.

    Args:
        model: the model; its values go into the program.
        images: an input; only its shape matters, and two pictures at least where their number is free.
        dynamic: whether the number of pictures is free.
    """
    shapes = {"images": {0: torch.export.Dim("batch")} if dynamic else None}
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    except VitrailError:
        raise
    except Exception as error:
        hint = "; batch=N exports it for N pictures at a time" if dynamic else ""
        raise ExportError(f"torch.export cannot follow this {_kind(model)} ({first_line(error)}){hint}") from error
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # names of files on this machine, in every node
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what other libraries warn about while they export; it is addressed to their developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", VitrailWarning)
        yield


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let an interrupt through that a library hid: where it fails while clearing up, its error comes in its place."""
    try:
        yield
    except ExportError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__cause__ or cause.__context__
        raise


def _kind(model: Plain) -> str:
    return type(model.model).__name__
