"""Base class of analysis results."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor


class Result:
    """Mixin for frozen dataclasses that convert to JSON.

    Fields with the metadata ``{"json": False}`` are left out: large maps that can be computed again.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; see :func:`plain`."""
        assert is_dataclass(self)
        return {
            field.name: plain(getattr(self, field.name)) for field in fields(self) if field.metadata.get("json", True)
        }


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
