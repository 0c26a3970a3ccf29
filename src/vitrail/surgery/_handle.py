"""``Handle``: the return type of every function that changes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail._deprecation import renamed_property
from vitrail.adapters import Found
from vitrail.errors import AlreadyApplied, InvalidOption, NotApplied, UnsupportedModel


@dataclass(eq=False, repr=False)
class Handle(ABC):
    """A reversible change to a model.

    Call :meth:`remove`, or leave a ``with`` block, to restore the model exactly. In subclasses :meth:`remove` starts
    with ``self._check_active()``.

    Attributes:
        model: the model that was passed to the function that made this handle.
        found: its trunk, blocks and adapters.
    """

    model: nn.Module
    found: Found

    _function: ClassVar[str]
    """The function that makes such a handle, for error messages."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the handle of a changed model, which may be a copy or unpickled.

        Raises:
            NotApplied: the model does not carry this change.
        """
        check_module(model)
        handle = cls._find(model)
        if handle is None:
            raise NotApplied(f"this {type(model).__name__} carries no {cls.__name__}; apply {cls._function} first")
        return handle

    @classmethod
    @abstractmethod
    def _find(cls, model: nn.Module) -> Self | None:
        """Return the handle of a changed model, if there is one."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the model still carries this change."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The options as plain data, to be passed to the function that made this handle."""

    @abstractmethod
    def remove(self) -> None:
        """Restore the model; raise :class:`~vitrail.errors.NotApplied` if the change was removed before."""

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return options as plain data, and tensors by name, from which :meth:`from_saved` makes this change again."""
        raise InvalidOption(f"{type(self).__name__} is not saved with a model: it has no entry in vitrail.json")

    @classmethod
    def from_saved(cls, model: nn.Module, options: dict[str, Any], tensors: dict[str, Tensor]) -> Handle:
        """Change a model by what :meth:`saved` returned; raise before it is changed if that does not fit."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the settings of all changes of this model into a directory: ``vitrail.json``, tensors beside it.

        ``vitrail.load`` applies them to the model again, and refuses another one. The model itself is not written.
        """
        from vitrail.surgery.saving import collect

        self._check_active()
        self.saved()
        collect(self.model).write(path)

    def __enter__(self) -> Self:
        self._check_active()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_active:
            self.remove()

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.config.items()]
        removed = [] if self.is_active else ["removed"]
        return f"{type(self).__name__}({', '.join([type(self.model).__name__, *options, *removed])})"

    is_applied = renamed_property("is_applied", "is_active")

    def _check_active(self) -> None:
        if not self.is_active:
            raise NotApplied(f"this {type(self).__name__} was removed from its model; apply {self._function} again")


@dataclass(eq=False, repr=False)
class HookHandle(Handle):
    """A change that consists of hooks; the trunk's attribute ``_mark`` holds the handle.

    Hooks are bound methods, or partials of them: copies and pickles of a model then have hooks of their own handle.
    """

    _mark: ClassVar[str]
    _name: ClassVar[str]
    _hooks: list[RemovableHandle] = field(default_factory=list, init=False)

    @classmethod
    def _find(cls, model: nn.Module) -> Self | None:
        return next((vars(part)[cls._mark] for part in model.modules() if cls._mark in vars(part)), None)

    @classmethod
    def _refuse_twice(cls, found: Found) -> None:
        if hasattr(found.trunk, cls._mark):
            raise AlreadyApplied(f"this model already has {cls._name}; call `{cls.__name__}.of(model).remove()` first")

    @property
    def is_active(self) -> bool:
        return bool(self._hooks)

    def _attach(self, hooks: list[RemovableHandle]) -> None:
        self._hooks = hooks
        setattr(self.found.trunk, self._mark, self)

    def remove(self) -> None:
        """Remove the hooks."""
        self._check_active()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        delattr(self.found.trunk, self._mark)


def check_module(model: object) -> None:
    """Raise if a model is none."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model, a torch.nn.Module; got {type(model).__name__}")
