"""Base class of analysis results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import numpy as np
from torch import Tensor

from vitrail._deprecation import renamed_property


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Result:
    """Base of results: subclasses are frozen dataclasses that convert to JSON.

    Options of the dataclass are those of the class, such as ``class Map(Result, eq=False)``. Fields with the metadata
    ``{"json": False}`` are left out of the JSON: large maps that can be computed again.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, *, frozen: bool = True, **options: Any) -> None:
        super().__init_subclass__()
        dataclass(frozen=frozen, **options)(cls)

    if not TYPE_CHECKING:  # type checkers are to see the fields alone

        def __getattr__(self, name: str) -> Any:
            """Resolve the deprecated names of fields, which say "picture" for "image"."""
            new = name.replace("picture", "image")
            if new == name or new not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return renamed_property(name, new).fget(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; see :func:`plain`."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self) if one.metadata.get("json", True)}


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and arrays to lists, non-finite numbers to None."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
