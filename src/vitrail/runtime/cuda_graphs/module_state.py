"""The state of a module that recorded work depends on: its parts, their classes and modes, hooks, tensors, merging."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

PLAN = "_vitrail_plan"
"""Attribute of a merged trunk."""


class ModuleState:
    """A module as it was when this was made. Reading it again takes about a microsecond per part.

    The tensors' memory is kept, so that recorded work may still run after they were replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._inside = [part._modules for part in self._modules if part._modules]
        self._held = [held for part in self._modules for held in (part._parameters, part._buffers) if held]
        self._hooks = [hooks for part in self._modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._parts, self._kinds = tuple(_values(self._inside)), [type(part) for part in self._modules]
        self._tensors = tuple(_values(self._held))
        self._memory = [None if tensor is None else tensor.detach() for tensor in self._tensors]
        self._pointers = list(map(_pointer, self._tensors))
        self._counts = list(map(len, self._hooks))
        self._modes = list(map(attrgetter("training"), self._modules))
        merging: list[dict[str, Any]] = [vars(part) for part in self._modules if vars(part).get(PLAN) is not None]
        self._plans: list[tuple[dict[str, Any], Any, Any]] = [
            (held, held[PLAN], held[PLAN].decision()) for held in merging
        ]

    @property
    def is_paused(self) -> bool:
        """Whether hooks or modes differ now, as they do for a while."""
        return (
            list(map(len, self._hooks)) != self._counts
            or list(map(attrgetter("training"), self._modules)) != self._modes
        )

    @property
    def holds(self) -> bool:
        """Whether the module has the same parts of the same classes, tensors in the same memory, and merges the same.

        Values of tensors may differ.
        """
        return (
            list(map(type, self._modules)) == self._kinds
            and _same(_values(self._inside), self._parts)
            and _same(_values(self._held), self._tensors)
            and list(map(_pointer, self._tensors)) == self._pointers
            and all(plan.decision() == before and held.get(PLAN) is plan for held, plan, before in self._plans)
        )


def _values(dicts: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(held.values() for held in dicts)


def _same(values: Iterable[Any], before: tuple[Any, ...]) -> bool:
    found = tuple(values)
    return len(found) == len(before) and all(map(is_, found, before))


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
