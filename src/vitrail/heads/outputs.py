"""What each head of a model says while the model runs as it always does: for ours, timm's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitrail.heads.by_role import Heads

LINEAR = {
    "head": "class",
    "head_dist": "distillation",
    "cls_classifier": "class",
    "distillation_classifier": "distillation",
}
"""What libraries call the linear heads that answer a model's own question."""


@contextmanager
def listen(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Take down the logits of every head for the model's own classes, by name and batch after batch, on the CPU.

    Class tokens that share a head are told apart. Heads of tasks and heads that regress are left out, and so are
    heads that were taken off.
    """
    found: dict[str, list[Tensor]] = {}
    handles = []

    def ours(heads: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        assert isinstance(heads, Heads)
        for name, value in heads.answers(*args, **kwargs).items():
            found.setdefault(name, []).append(value.detach().cpu())

    def theirs(name: str) -> Callable[..., None]:
        return lambda _, __, output: found.setdefault(name, []).append(output.detach().cpu())

    parts = dict(model.named_modules())
    for path, part in parts.items():
        inside, _, name = path.rpartition(".")
        if isinstance(part, Heads):
            handles.append(part.register_forward_hook(ours, with_kwargs=True))
        elif name in LINEAR and hasattr(part, "out_features") and not isinstance(parts[inside], Heads):
            handles.append(part.register_forward_hook(theirs(LINEAR[name])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
