"""The registry of model libraries and adapters: finding a supported trunk in a model, and loading models by name.

Libraries are found, never imported early: a model of a library exists only where that library is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from vitrail._arguments import checked
from vitrail._checks import as_path, shown
from vitrail.adapters.base import BlockAdapter, Library, TrunkAdapter
from vitrail.data.media.modality import MODALITIES
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedModel
from vitrail.tokens import TokenLayout

LIBRARIES: dict[str, str | Library] = {
    "timm": "vitrail.adapters.timm",
    "hf": "vitrail.adapters.transformers",
    "torchvision": "vitrail.adapters.torchvision",
    "open_clip": "vitrail.adapters.open_clip",
    "vitrail": "vitrail.adapters.vitrail",
}
"""Libraries by the prefix of their models' names: a `Library`, or the module whose ``LIBRARY`` is one."""

ADAPTERS: dict[type | str, TrunkAdapter] = {}
"""Adapters by trunk class, or by its dotted name. A library's own are added once the library is imported."""


SOURCE_ATTRIBUTE = "_vitrail_source"
"""Attribute of a loaded model that holds the name it was loaded by."""


@dataclass(frozen=True)
class Found:
    """A supported trunk inside a user's model."""

    trunk: nn.Module
    adapter: TrunkAdapter
    blocks: tuple[nn.Module, ...]
    block_adapters: tuple[BlockAdapter, ...]


def register_adapter(trunk_class: type | str, adapter: TrunkAdapter) -> None:
    """Register the adapter of a model class, so that everything Vitrail does works on its models.

    The class is given itself, or by its dotted name (``"package.module.Class"``), which imports nothing. Subclasses are
    included; an adapter registered before for the same class is replaced. See ``docs/adapters.md``.

    Example:
        >>> vitrail.register_adapter("mylib.models.MyViT", MyAdapter())  # doctest: +SKIP
    """
    dotted = isinstance(trunk_class, str) and all(part.isidentifier() for part in trunk_class.split("."))
    if not (isinstance(trunk_class, type) or (dotted and "." in str(trunk_class))):
        raise InvalidOption(f"trunk_class={trunk_class!r}; expected a class, or its dotted name 'package.module.Class'")
    if not isinstance(adapter, TrunkAdapter):
        raise InvalidOption(f"adapter={adapter!r}; expected an instance of vitrail.adapters.TrunkAdapter")
    ADAPTERS[trunk_class] = adapter


def library(prefix: str) -> Library:
    """Return the library of a prefix; importing its adapter does not import the library itself."""
    entry = LIBRARIES[prefix]
    if isinstance(entry, str):
        found: Library = import_module(entry).LIBRARY
        return found
    return entry


def split_name(name: str) -> tuple[Library | None, str]:
    """Split ``PREFIX:NAME`` into its library and the rest; the library is None where there is no known prefix."""
    prefix, colon, rest = name.partition(":")
    return (library(prefix), rest) if colon and prefix in LIBRARIES else (None, name)


def library_of(config: Mapping[str, Any]) -> Library:
    """Return the library of a trained model by its ``config.json``, or what training keeps of it; ours by default."""
    return next((one for one in map(library, LIBRARIES) if one.restores(config)), library("vitrail"))


def find(model: nn.Module) -> Found:
    """Find the one supported trunk in a model: the model itself, or a part of it."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model, a torch.nn.Module; got {type(model).__name__}")
    _register_imported()
    known = {kind: adapter for key, adapter in ADAPTERS.items() if (kind := _class(key)) is not None}
    trunks = [
        (name, part, adapter)
        for name, part in model.named_modules()
        for adapter in [known[kind] for kind in type(part).__mro__ if kind in known][:1]
    ]
    if not trunks:
        raise UnsupportedModel(
            f"{type(model).__name__} is not a supported model and contains none; supported are "
            f"{', '.join(supported())}. vitrail.register_adapter adds others"
        )
    # where one wraps another, as in transformers before 5.6, the inner one has the blocks
    trunks = [one for one in trunks if not any(other[1] in set(one[1].modules()) - {one[1]} for other in trunks)]
    if len(trunks) > 1:
        raise UnsupportedModel(
            f"{type(model).__name__} contains {len(trunks)} supported models ({', '.join(one[0] for one in trunks)}); "
            "pass one of them"
        )
    _, trunk, adapter = trunks[0]
    adapter.check(trunk)
    try:
        blocks = tuple(adapter.blocks(trunk))
    except AttributeError:
        blocks = ()
    if not blocks:
        raise UnsupportedModel(f"this {type(trunk).__name__} has no blocks, so there is nothing to merge in")
    return Found(trunk, adapter, blocks, tuple(adapter.block_adapter(block) for block in blocks))


@checked
def image_model(model: nn.Module) -> nn.Module:
    """Return what runs a supported model on images alone, see `TrunkAdapter.image_model`."""
    found = find(model)
    return found.adapter.image_model(model, found.trunk)


def supported() -> list[str]:
    """Return the names of the supported model classes."""
    of_libraries = {
        name: f"{one.package.partition('.')[0]} {name.rpartition('.')[2]}"
        for one in map(library, LIBRARIES)
        for name in one.trunks()
    }
    others = [key if isinstance(key, str) else key.__name__ for key in ADAPTERS if key not in of_libraries]
    return [*of_libraries.values(), *others]


def load_model(name: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Load a model by name, in eval mode.

    Args:
        name: ``timm:NAME``, ``hf:REPO-OR-DIRECTORY``, ``torchvision:NAME``, ``open_clip:NAME:TAG``,
            ``vitrail:NAME-OR-DIRECTORY``, or the directory of a run or of a saved model.
        pretrained: whether to load trained weights instead of random ones.
        options: for the library's own constructor.
    """
    given = name
    if not isinstance(pretrained, bool):
        raise InvalidOption(f"pretrained={shown(pretrained)}: expected True or False")
    name = str(name) if isinstance(name, str | Path) and name != "" and as_path("model", name) else ""
    found, rest = split_name(name)
    if found is None and rest and Path(rest).is_dir():
        found, rest = library("vitrail"), f"local-dir:{rest}"
    if found is None or not rest:
        known = ", ".join(f"{prefix}:NAME" for prefix in LIBRARIES)
        raise ModelLoadError(f"a model is named {known}; got {shown(given)}")
    model = found.load(rest, pretrained, **options)
    setattr(model, SOURCE_ATTRIBUTE, name if not options else None)
    return model


@checked
def size_options(name: str, size: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the options with which `load_model` builds a model for inputs of a size; none where it needs none."""
    found, _ = split_name(name)
    return {} if found is None or size is None else found.size_options(size)


def sized(found: Found, size: tuple[int, ...] | None, name: str) -> tuple[InputSpec, TokenLayout]:
    """Return a model's input specification and layout for a height and width, or for its own size.

    Frames may come before the height of clips. Raise if the size is not a whole number of patches.
    """
    spec = found.adapter.input_spec(found.trunk)
    if size is None:
        return spec, found.adapter.layout(found.trunk, spec.size)
    if len(size) > len(spec.size):
        raise InvalidOption(f"size {_by(size)}: {name} takes {MODALITIES[spec.modality].size}; got {len(size)} numbers")
    spec = replace(spec, size=(*spec.size[: -len(size)], *size))
    with suppress(ValueError):  # smaller than a patch
        layout = found.adapter.layout(found.trunk, spec.size)
        if not any(side % cells for side, cells in zip(size, layout.grid[-len(size) :], strict=True)):
            return spec, layout
    raise InvalidOption(
        f"size {_by(size)} is not a whole number of patches of {name}; choose a multiple of its patch size "
        "(often 16 or 14) in each direction, or leave the size out"
    )


def _by(size: tuple[int, ...]) -> str:
    """Return a size as the command line takes it."""
    return "x".join(map(str, size))


@checked
def input_spec(model: nn.Module) -> InputSpec:
    """Return the size and normalization that a supported model expects of its inputs."""
    found = find(model)
    return found.adapter.input_spec(found.trunk)


def declared_spec(model: nn.Module) -> InputSpec | None:
    """Return the input specification of any model, supported or not, as its library declares it; None if unknown."""
    try:
        return input_spec(model)
    except UnsupportedModel:
        declared = (one.declared_spec(model) for one in _imported())
        return next((spec for spec in declared if spec is not None), None)


def named_classes(model: nn.Module, outputs: int) -> tuple[str, ...] | None:
    """Return the names of the classes that a classifier was published with; None where its library keeps none."""
    found = (one.class_names(model) for one in _imported())
    return next((names for names in found if names is not None and len(names) == outputs), None)


def head_names() -> dict[str, str]:
    """Return the attribute names of the linear heads of all imported libraries, each with the role that it reads."""
    return {name: role for one in _imported() for name, role in one.heads.items()}


def _imported() -> list[Library]:
    """Return the libraries whose package is imported; others cannot have made a model."""
    return [one for one in map(library, LIBRARIES) if one.package in sys.modules]


def _register_imported() -> None:
    for one in _imported():
        for name, adapter in one.trunks().items():
            ADAPTERS.setdefault(name, adapter)


def _class(key: type | str) -> type | None:
    """Return a class by its dotted name, if its module is imported."""
    if isinstance(key, type):
        return key
    module, _, name = key.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
