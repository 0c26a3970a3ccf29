"""Base class of analysis results."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, dataclass_transform

import numpy as np
from torch import Tensor


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
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
