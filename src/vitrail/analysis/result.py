"""What every result of an analysis can do: become plain values that JSON takes."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor


class Result:
    """Mixin of frozen dataclasses: results that can be written down.

    A field whose metadata says ``{"json": False}`` is left out: maps that are large and can be computed again.
    """

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as plain values: tensors and arrays as lists, numbers that are not finite as None."""
        assert is_dataclass(self)
        return {
            field.name: plain(getattr(self, field.name)) for field in fields(self) if field.metadata.get("json", True)
        }


def plain(value: Any) -> Any:
    """Make a value fit for JSON."""
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
