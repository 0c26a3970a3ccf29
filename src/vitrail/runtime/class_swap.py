"""Change what a module does by swapping its class, and restore it.

A swapped module is the same object with the same parameters, buffers, hooks and attributes; its class is a subclass
with a mixin in front of the original class, under the original's name. That survives deepcopy, pickle, DataParallel,
DDP, FSDP and ``torch.compile``, and is undone by assigning the class back.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


@functools.cache
def swapped_class(mixin: type, original: type) -> type:
    """Return the subclass of ``original`` with ``mixin`` in front; cached, so it is the same class every time."""
    names = {
        # libraries key their registries by a class's printed name
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "_vitrail_swap": (mixin, original),
    }
    return type(original.__name__, (mixin, original), names)


def swap(module: nn.Module, mixin: type) -> None:
    """Put a mixin in front of a module's class."""
    original: type = type(module)
    module.__class__ = swapped_class(mixin, original)


def original_class(module: nn.Module) -> type | None:
    """Return the class that a module had before it was swapped; None if it was not swapped.

    Where another class was put in front since (as FSDP does), return one with that class in front of the original.
    """
    kind: type = type(module)
    return _without_swap(kind)


@functools.cache
def _without_swap(kind: type) -> type | None:
    made = vars(kind).get("_vitrail_swap")
    if made is not None:
        return made[1]
    bases = tuple(map(_base_without_swap, kind.__bases__))
    if bases == kind.__bases__:
        return None
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, names)


def _base_without_swap(base: type) -> type:
    return _without_swap(base) or base


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy by mixin and original class: the swapped class itself is not importable by name."""
    mixin, original = type(self)._vitrail_swap  # type: ignore[attr-defined]
    return _rebuild, (mixin, original), self.__dict__.copy()


def _rebuild(mixin: type, original: type) -> nn.Module:
    kind: Any = swapped_class(mixin, original)
    return kind.__new__(kind)
