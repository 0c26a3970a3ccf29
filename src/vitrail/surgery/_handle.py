"""``Handle``: the return type of every function that changes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from torch import nn

from vitrail._deprecation import renamed_property
from vitrail.errors import NotApplied


class Handle(ABC):
    """A reversible change to a model.

    Call :meth:`remove`, or leave a ``with`` block, to restore the model exactly. A subclass sets ``model`` and
    ``_function``, and defines :meth:`of`, :attr:`is_active`, :attr:`config` and :meth:`remove`, which starts with
    ``self._check_active()``.

    Attributes:
        model: the model that was changed.
    """

    model: nn.Module
    _function: ClassVar[str]
    """The function that makes such a handle, for error messages."""

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the handle of a changed model; raise :class:`~vitrail.errors.NotApplied` if there is none."""

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

    @classmethod
    def _not_found(cls, model: object) -> NotApplied:
        return NotApplied(f"this {type(model).__name__} carries no {cls.__name__}; apply {cls._function} first")
