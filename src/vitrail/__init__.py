"""Vitrail: a toolkit for the tokens of Vision Transformers.

``__all__`` is the public interface. ``import vitrail`` loads torch and nothing optional; the names in ``_LAZY`` load
their modules on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail import errors
from vitrail.adapters import load_model, register_adapter
from vitrail.merging import Assignment, Context, Method, Reduction, ToMe, list_methods, register_method
from vitrail.runtime.cuda_graphs.capture import CapturedModel, capture
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
    from_pretrained,
    load,
    load_method,
    look_ahead,
    merge,
    record,
    test_time_registers,
)
from vitrail.tokens import Role, TokenLayout, TokenSpan, TokenSpec

if TYPE_CHECKING:
    from vitrail.adapters.saved import class_names
    from vitrail.embedding import Embeddings, embed, predict, read_embeddings
    from vitrail.models import ViT, ViTConfig, create_model, from_timm, list_models, to_timm
    from vitrail.report.comparison import compare
    from vitrail.report.inspection import inspect
    from vitrail.report.report import Report
    from vitrail.tuning.tuner import tune

__version__ = "0.3.0"

__all__ = [
    "Ablation",
    "AddedTokens",
    "Assignment",
    "CapturedModel",
    "Context",
    "Count",
    "Embeddings",
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
    "capture",
    "class_names",
    "compare",
    "count",
    "create_model",
    "embed",
    "errors",
    "find_register_neurons",
    "from_pretrained",
    "from_timm",
    "inspect",
    "list_methods",
    "list_models",
    "load",
    "load_method",
    "load_model",
    "look_ahead",
    "merge",
    "predict",
    "read_embeddings",
    "record",
    "register_adapter",
    "register_method",
    "test_time_registers",
    "to_timm",
    "tune",
]

_LAZY = {
    "vitrail.adapters.saved": ("class_names",),
    "vitrail.embedding": ("Embeddings", "embed", "predict", "read_embeddings"),
    "vitrail.models": ("ViT", "ViTConfig", "create_model", "from_timm", "list_models", "to_timm"),
    "vitrail.report": ("Report", "compare", "inspect"),
    "vitrail.tuning": ("tune",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
