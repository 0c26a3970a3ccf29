"""Deprecated names, resolved with a ``DeprecationWarning``."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])


def renamed_attributes(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` that resolves renamed attributes.

    Args:
        module: name of the module whose attributes were renamed.
        renamed: old names, each with its new home as ``"package.module:name"``.

    >>> __getattr__ = renamed_attributes(__name__, {"PictureError": "vitrail.errors:ImageError"})
    """

    def resolve(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = renamed[name].partition(":")
        value = getattr(importlib.import_module(home), new)
        caller = sys._getframe(1)  # the module's own __getattr__ may stand between this function and the caller
        within = caller.f_code.co_name == "__getattr__" and caller.f_globals.get("__name__") == module
        warnings.warn(
            f"{module}.{name} is deprecated and will be removed in 0.4; use {home}.{new}",
            DeprecationWarning,
            stacklevel=3 if within else 2,
        )
        return value

    return resolve


def renamed_property(old: str, new: str) -> property:
    """Return a property that reads the attribute ``new``, for a class whose attribute ``old`` was renamed."""

    def resolve(self: Any) -> Any:
        kind = type(self).__name__
        warnings.warn(
            f"{kind}.{old} is deprecated and will be removed in 0.4; use {kind}.{new}", DeprecationWarning, stacklevel=2
        )
        return getattr(self, new)

    return property(resolve, doc=f"Deprecated name of ``{new}``.")


def renamed_arguments(**renamed: str) -> Callable[[Target], Target]:
    """Return a decorator, for functions and classes, that accepts keyword arguments under their old names.

    >>> @renamed_arguments(forms="modes")
    ... def time_models(modes: str) -> None: ...
    """

    def decorate(target: Target) -> Target:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in renamed.keys() & kwargs.keys():
                message = f"{target.__name__}({old}=…) is deprecated and will be removed in 0.4; use {renamed[old]}=…"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[renamed[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return call  # type: ignore[return-value]
        target.__init__ = call  # type: ignore[misc]
        return target

    return decorate
