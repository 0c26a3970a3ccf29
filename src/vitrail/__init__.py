"""Vitrail: tokens of Vision Transformers, with roles, merged, and seen.

The public names are these; importing them loads torch and nothing optional.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail import errors
from vitrail.adapters import load_model, register_adapter
from vitrail.merging import Assignment, Context, Method, Reduction, ToMe, register_method
from vitrail.surgery import (
    Ablation,
    AddedTokens,
    Count,
    Merging,
    Recording,
    RegisterNeurons,
    TestTimeRegisters,
    Trace,
    ablate,
    add_tokens,
    count,
    find_register_neurons,
    merge,
    record,
    test_time_registers,
)
from vitrail.tokens import Role, TokenLayout, TokenSpan, TokenSpec

if TYPE_CHECKING:
    from vitrail.adapters.saved import class_names
    from vitrail.models import ViT, ViTConfig, create_model, from_timm, list_models, to_timm
    from vitrail.report.comparison import compare
    from vitrail.report.inspection import inspect
    from vitrail.report.report import Report

__version__ = "0.2.0"

__all__ = [
    "Ablation",
    "AddedTokens",
    "Assignment",
    "Context",
    "Count",
    "Merging",
    "Method",
    "Recording",
    "Reduction",
    "RegisterNeurons",
    "Report",
    "Role",
    "TestTimeRegisters",
    "ToMe",
    "TokenLayout",
    "TokenSpan",
    "TokenSpec",
    "Trace",
    "ViT",
    "ViTConfig",
    "ablate",
    "add_tokens",
    "class_names",
    "compare",
    "count",
    "create_model",
    "errors",
    "find_register_neurons",
    "from_timm",
    "inspect",
    "list_models",
    "load_model",
    "merge",
    "record",
    "register_adapter",
    "register_method",
    "test_time_registers",
    "to_timm",
]

_LATER = {
    "class_names": "vitrail.adapters.saved",
    **dict.fromkeys(("Report", "compare", "inspect"), "vitrail.report"),
    **dict.fromkeys(("ViT", "ViTConfig", "create_model", "from_timm", "list_models", "to_timm"), "vitrail.models"),
}
"""Names whose modules are loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
