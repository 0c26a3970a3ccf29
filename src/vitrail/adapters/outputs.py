"""Outputs of models: the one tensor of an output, and the logits of each head, recorded while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitrail._wording import kind_of
from vitrail.adapters.registry import head_names
from vitrail.errors import UnsupportedInput
from vitrail.heads.by_role import Heads


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
    """Return the tensor of a model's output: the output itself, its logits, pooled features or tokens."""
    names = ("logits", "pooler_output", "last_hidden_state")
    for value in (output, *(getattr(output, name, None) for name in names)):
        if isinstance(value, Tensor):
            return value
    raise UnsupportedInput(
        f"the model returned {kind_of(output)}; expected a tensor, or an output with {' or '.join(names)}"
    )
