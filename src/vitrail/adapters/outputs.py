"""Outputs of models: their tensors, their main tensor, and the logits of each head, recorded while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._wording import kind_of
from vitrail.adapters.registry import head_names
from vitrail.adapters.saved import class_names
from vitrail.errors import UnsupportedInput
from vitrail.heads.by_role import Heads, Output


@checked
@contextmanager
def head_outputs(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the logits of every head for the model's own classes, by name, one tensor per batch, on the CPU.

    Class tokens that share a head are separate entries. Heads of tasks, heads that regress and removed heads are left
    out.
    """
    found: dict[str, list[Tensor]] = {}
    handles = []

    def by_role(heads: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        assert isinstance(heads, Heads)
        for name, value in heads.token_logits(*args, **kwargs).items():
            found.setdefault(name, []).append(value.detach().cpu())

    def linear(name: str) -> Callable[..., None]:
        return lambda _, __, output: found.setdefault(name, []).append(output.detach().cpu())

    roles, parts = head_names(), dict(model.named_modules())
    for path, part in parts.items():
        inside, _, name = path.rpartition(".")
        if isinstance(part, Heads):
            handles.append(part.register_forward_hook(by_role, with_kwargs=True))
        elif name in roles and hasattr(part, "out_features") and not isinstance(parts[inside], Heads):
            handles.append(part.register_forward_hook(linear(roles[name])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a model's output: the output itself, its logits, pooled features or tokens.

    Of a model with task tokens alone, it is the logits of all tasks side by side.
    """
    if isinstance(output, Output) and output.logits is None and output.by_role:
        return torch.cat(list(output.by_role.values()), 1)
    names = ("logits", "pooler_output", "last_hidden_state")
    for value in (output, *(getattr(output, name, None) for name in names)):
        if isinstance(value, Tensor):
            return value
    raise UnsupportedInput(
        f"the model returned {kind_of(output)}; expected a tensor, or an output with {' or '.join(names)}"
    )


def task_sizes(model: nn.Module, output: Any) -> list[int]:
    """Return the number of classes of each task, in the order in which `output_tensor` has them side by side."""
    heads = output.by_role if isinstance(output, Output) else {}
    if heads and output.logits is None:
        return [scores.shape[1] for scores in heads.values()]
    sizes = [len(names) for column, names in class_names(model).items() if column not in heads]
    width = output_tensor(output).shape[-1]
    return sizes if sum(sizes) == width else [width]


CONSTANTS = (type(None), bool, int, float, str)
"""What outputs may hold besides tensors."""


def map_tensors(function: Callable[..., Any], *outputs: Any) -> Any:
    """Return an output of the same structure, with ``function`` of the tensors at the same place in all outputs.

    Structures are tuples, named or not, lists, mappings and dataclasses, such as the outputs of transformers.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return function(*outputs)
    if is_dataclass(first) and not isinstance(first, type):
        parts = {field.name: [getattr(output, field.name) for output in outputs] for field in fields(first)}
        return replace(first, **{name: map_tensors(function, *values) for name, values in parts.items()})
    if isinstance(first, Mapping):
        made: Any = type(first)
        return made({name: map_tensors(function, *(output[name] for output in outputs)) for name in first})
    if isinstance(first, list | tuple):
        items = [map_tensors(function, *values) for values in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, CONSTANTS):
        return first
    raise UnsupportedInput(
        f"the model returned {kind_of(first)}; expected tensors in tuples, lists, mappings or dataclasses"
    )
