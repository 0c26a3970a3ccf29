"""Collect the changes of a model as settings, and apply settings to a model: all of them, or none."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption, ModelLoadError, NotApplied
from vitrail.surgery._handle import Handle, check_module
from vitrail.surgery.added_tokens import AddedTokens
from vitrail.surgery.merging import Merging
from vitrail.surgery.merging.saved import merge_options
from vitrail.surgery.registers import TestTimeRegisters
from vitrail.surgery.saving.base import Base, Check, check_kind
from vitrail.surgery.saving.settings import CHANGES, Settings

HANDLES: dict[str, type[Handle]] = dict(zip(CHANGES, (AddedTokens, Merging, TestTimeRegisters), strict=True))
"""Handles by the name of their change in ``vitrail.json``."""


def handles_of(model: nn.Module) -> dict[str, Handle]:
    """Return the handles of all changes of a model that can be saved."""
    found = {}
    for name, kind in HANDLES.items():
        try:
            found[name] = kind.of(model)
        except NotApplied:
            continue
    return found


def collect(model: nn.Module, *, weights: bool = True) -> Settings:
    """Return the settings of all changes that a model carries; without any, they are empty.

    Args:
        weights: whether to keep a digest of the model's own weights, so that others can be refused.
    """
    changes, tensors = {}, {}
    for name, handle in handles_of(model).items():
        changes[name], parts = handle.saved()
        tensors.update({f"{name}.{part}": value for part, value in parts.items()})
    base = Base.of(model, find(model), weights=weights) if changes else None
    return Settings(changes, tensors, base, "the model's own settings")


def apply(settings: Settings, model: nn.Module, *, check: Check | None = "structure") -> dict[str, Handle]:
    """Make changes to a model again; return their handles by name. If one fails, the model is as before.

    Args:
        check: what must be as it was when the settings were saved: ``"structure"``, ``"weights"`` as well, or None
            for no check. Settings without a base are not checked.

    Raises:
        ModelLoadError: the model is another one than the settings were saved for, or the settings do not fit it.
    """
    check_module(model)
    check_kind(check)
    found = find(model)
    if settings.base is not None and check is not None:
        check_base(settings, settings.base, model, found, check)
    made: dict[str, Handle] = {}
    try:
        for name in (name for name in CHANGES if name in settings.changes):
            made[name] = HANDLES[name].from_saved(model, dict(settings.changes[name]), settings.of(name))
    except BaseException as error:
        for handle in reversed(made.values()):
            handle.remove()
        if isinstance(error, TypeError | ValueError | KeyError | AttributeError | RuntimeError | OverflowError) or (
            isinstance(error, InvalidOption) and settings.base is not None
        ):
            why = " ".join(str(error).split()) or type(error).__name__
            raise ModelLoadError(f"{settings.source} cannot be applied to this model: {why:.300}") from error
        raise
    return made


def merge_arguments(settings: Settings, model: nn.Module, *, check: Check | None = "structure") -> dict[str, Any]:
    """Return the arguments of `vitrail.merge` in settings that change nothing else, checked as :func:`apply` does."""
    if set(settings.changes) != {"merge"}:
        kinds = ", ".join(settings.changes) or "no change"
        raise InvalidOption(f"{settings.source} has {kinds}; here only a merging can be applied. Use vitrail.load")
    if settings.base is not None and check is not None:
        check_base(settings, settings.base, model, find(model), check)
    options = settings.changes["merge"]
    return merge_options(model, options, settings.of("merge")) if settings.tensors else dict(options)


def check_base(settings: Settings, saved: Base, model: nn.Module, found: Found, check: Check) -> None:
    """Raise if a model is not the one that settings were saved for."""
    difference = saved.difference(Base.of(model, found, weights=check == "weights"))
    if difference is not None:
        hint = "the model that they were saved with, or check=None to apply them anyway"
        raise ModelLoadError(f"the settings of {settings.source} do not fit: {difference}. Pass {hint}")
