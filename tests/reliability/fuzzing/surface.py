"""What is fuzzed: every public function and every command, found in the package itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import typer

import vitrail

NOT_CALLED = frozenset(
    {
        "vitrail.register_adapter",  # what they register stays for all other tests
        "vitrail.register_method",
        "vitrail.adapters.register_adapter",
        "vitrail.merging.register_method",
    }
)

LAYERS_INSIDE = frozenset({"vitrail.kernels", "vitrail.runtime", "vitrail.pictures"})
"""Packages whose functions take what others have checked; users do not call them."""


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by their dotted names, each object once."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for name, value in _public():
        if inspect.isfunction(value) and id(value) not in seen and name not in NOT_CALLED:
            seen.add(id(value))
            found[name] = value
    return found


def _public() -> Iterator[tuple[str, Any]]:
    packages = [vitrail]
    for module in pkgutil.iter_modules(vitrail.__path__, "vitrail."):
        inside = module.name.rpartition(".")[2]
        if not inside.startswith("_") and inside != "cli" and module.name not in LAYERS_INSIDE and module.ispkg:
            try:
                packages.append(importlib.import_module(module.name))
            except ImportError:  # an optional library is missing
                continue
    for package in packages:
        for name in getattr(package, "__all__", ()):
            value = _member(package, name)
            if isinstance(value, ModuleType):
                yield from _of_module(value)
            else:
                yield f"{package.__name__}.{name}", value


def _member(package: ModuleType, name: str) -> Any:
    try:
        return getattr(package, name)
    except AttributeError:
        return importlib.import_module(f"{package.__name__}.{name}")


def _of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__):
            yield f"{module.__name__}.{name}", value


def commands() -> dict[str, Any]:
    """Return the commands by name, with their declared parameters."""
    from vitrail.cli._app import COMMANDS, STYLE

    found = {}
    for name in COMMANDS:
        module = importlib.import_module(f"vitrail.cli.{name}")
        alone = typer.Typer(**STYLE)
        alone.command()(getattr(module, name))
        found[name] = typer.main.get_command(alone)
    return found
