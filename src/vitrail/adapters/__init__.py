"""Reaching into the libraries' models: one file per library, one entry in ``ADAPTERS``.

Libraries are found, never imported early: a model of a library exists only where that library is loaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, UnsupportedModel

ADAPTERS = {"timm": "timm", "hf": "transformers", "vitrail": "vitrail"}
"""Libraries by the prefix of their models' names; ``vitrail.adapters.LIBRARY`` is the adapter's module."""

_LIBRARIES = {"vitrail": "vitrail.models"}
"""What is loaded where a library's models are, if it is not called as its adapter is."""


@dataclass(frozen=True)
class Found:
    """A supported trunk inside a user's model."""

    trunk: nn.Module
    adapter: TrunkAdapter
    blocks: tuple[nn.Module, ...]
    block_adapters: tuple[BlockAdapter, ...]


def find(model: nn.Module) -> Found:
    """Find the one supported trunk in a model: the model itself, or a part of it."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model, a torch.nn.Module; got {type(model).__name__}")
    kinds = {kind: adapter for library in _loaded() for kind, adapter in library.trunks().items()}
    known = tuple(kinds)
    trunks: list[tuple[str, nn.Module]] = [
        (name, part) for name, part in model.named_modules() if issubclass(type(part), known)
    ]
    if not trunks:
        raise UnsupportedModel(
            f"{type(model).__name__} is not a supported model and has none inside; supported are "
            f"{', '.join(supported())}"
        )
    if len(trunks) > 1:
        raise UnsupportedModel(
            f"{type(model).__name__} has {len(trunks)} models inside ({', '.join(name for name, _ in trunks)}); "
            "pass the one that is meant"
        )
    trunk = trunks[0][1]
    adapter = next(adapter for kind, adapter in kinds.items() if isinstance(trunk, kind))
    adapter.check(trunk)
    try:
        blocks = tuple(adapter.blocks(trunk))
    except AttributeError:
        blocks = ()
    if not blocks:
        raise UnsupportedModel(f"this {type(trunk).__name__} has no blocks, so there is nothing to merge in")
    return Found(trunk, adapter, blocks, tuple(adapter.block_adapter(block) for block in blocks))


def supported() -> list[str]:
    """Name the supported model classes of the installed libraries."""
    names = []
    for prefix, library in ADAPTERS.items():
        try:
            module = import_module(f"vitrail.adapters.{library}")
            names += [f"{library} {kind.__name__}" for kind in module.trunks()]
        except ImportError:
            names.append(f"{library} (not installed; `pip install vitrail[{library}]`, models named {prefix}:NAME)")
    return names


def load_model(name: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Create a model by name, in eval mode: ``timm:NAME``, ``hf:REPO-OR-FOLDER``, or ``vitrail:NAME-OR-FOLDER``.

    A folder's name alone will do for models and runs of ours. Options go to the library's own constructor.
    """
    prefix, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    if isinstance(name, str) and name and prefix not in ADAPTERS and Path(name).is_dir():
        prefix, rest = "vitrail", f"local-dir:{name}"
    if prefix not in ADAPTERS or not rest:
        known = ", ".join(f"{prefix}:NAME" for prefix in ADAPTERS)
        raise ModelLoadError(f"a model is named {known}; got {name!r}")
    return import_module(f"vitrail.adapters.{ADAPTERS[prefix]}").load(rest, pretrained, **options)


def preprocessing(model: nn.Module) -> InputSpec:
    """What a supported model expects of a picture."""
    found = find(model)
    return found.adapter.preprocessing(found.trunk)


def _loaded() -> list[Any]:
    names = [library for library in ADAPTERS.values() if _LIBRARIES.get(library, library) in sys.modules]
    return [import_module(f"vitrail.adapters.{library}") for library in names]
