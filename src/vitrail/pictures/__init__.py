"""Deprecated alias of ``vitrail.data`` and ``vitrail.drawing``; removed in 0.4."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_RENAMED = {"read_picture": "read_image", "check_picture": "check_image", "find_pictures": "find_images"}
_DRAWING = ("contact_sheet", "stained_glass")


def __getattr__(name: str) -> Any:
    module = "vitrail.drawing" if name in _DRAWING else "vitrail.data"
    new = _RENAMED.get(name, name)
    try:
        value = getattr(importlib.import_module(module), new)
    except AttributeError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
    warnings.warn(f"vitrail.pictures.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
    return value
