"""From a model to a ``torch.export`` program with plain tensors as outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrail._wording import kind_of
from vitrail.adapters.registry import named_classes
from vitrail.adapters.saved import class_names, target_specs
from vitrail.errors import ExportError, VitrailError, VitrailWarning
from vitrail.heads import Output
from vitrail.surgery import AddedTokens
from vitrail.surgery.added_tokens import added_module

if TYPE_CHECKING:
    from vitrail.training.objective.targets import Target

MAX_MESSAGE = 300
"""Characters of another library's message to pass on."""


class PlainModel(nn.Module):
    """Wrapper whose output is a tensor, or a dict of tensors, instead of a library's output class.

    Its programs load where the model's library is not installed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.added = AddedTokens.of(model) if added_module(model) is not None else None
        self.names = class_names(model)
        self.tasks: tuple[Target, ...] = ()
        if len(self.names) > 1:
            from vitrail.training.objective.targets import assign_targets

            self.tasks = assign_targets(model, self.names, target_specs(model))
        self.eval()  # the model already is

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        outputs = self.outputs(images)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name; if one head serves several tasks, one output for each task."""
        if self.added is not None:
            found = self.added(images)
            return self._named(found.own) | found.by_role
        return self._named(self.model(images))

    def _named(self, result: Any) -> dict[str, Tensor]:
        if isinstance(result, Tensor) and self.tasks:
            return {task.name: task.read(result) for task in self.tasks}
        return named_tensors(result)

    def class_names(self, outputs: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """Return the class names of those outputs that score classes with names."""
        if not self.names:
            found = {
                name: named_classes(self.model, value.shape[1]) for name, value in outputs.items() if value.dim() == 2
            }
            return {name: names for name, names in found.items() if names is not None}
        own = {task.name: {task.name, *task.heads, *(["logits"] if task.own else [])} for task in self.tasks}
        return {
            output: names
            for column, names in self.names.items()
            for output, value in outputs.items()
            if value.shape[1:] == (len(names),) and output in own.get(column, outputs)
        }


def named_tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name; ``output`` for a bare tensor."""
    tensors = dict(_walk(result, ""))
    if not tensors:
        raise ExportError(
            f"the model returned {kind_of(result)}; expected a tensor, or a dict or tuple of tensors. Wrap the "
            "model in a module that returns tensors"
        )
    return tensors


def _walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Output):  # features are not exported
        yield from _walk({"logits": value.logits, **value.by_role, "dense": value.dense}, name)
    elif isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _walk(part, f"{name or 'output'}_{index}")


def trace(model: PlainModel, images: Tensor, dynamic: bool) -> torch.export.ExportedProgram:
    """Trace a model into a program for inputs like ``images``: for any batch size, if ``dynamic``."""
    shapes = {"images": {0: torch.export.Dim("batch")} if dynamic else None}
    hint = "; try a fixed batch size with batch=N" if dynamic else ""
    with explained(f"torch.export cannot trace this {type(model.model).__name__}", hint), torch.no_grad(), quiet():
        program = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # file paths of this machine
    return program


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence other libraries' warnings and these loggers; they address those libraries' developers."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", VitrailWarning)
        try:
            for logger in levels:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)


@contextmanager
def explained(what: str, hint: str = "") -> Iterator[None]:
    """Raise ``ExportError`` for any error inside another library, with the error's first line."""
    try:
        yield
    except (OSError, VitrailError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:MAX_MESSAGE]
        raise ExportError(f"{what} ({text}){hint}") from error
