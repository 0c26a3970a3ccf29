"""Vitrail: tokens of Vision Transformers, with roles, merged, and seen.

The public names are these; importing them loads torch and nothing optional.
"""

from vitrail import errors
from vitrail.adapters import load_model
from vitrail.merging import Assignment
from vitrail.surgery import (
    Ablation,
    Merging,
    Recording,
    RegisterNeurons,
    TestTimeRegisters,
    Trace,
    ablate,
    find_register_neurons,
    merge,
    record,
    test_time_registers,
)
from vitrail.tokens import Role, TokenLayout, TokenSpan

__version__ = "0.1.0"

__all__ = [
    "Ablation",
    "Assignment",
    "Merging",
    "Recording",
    "RegisterNeurons",
    "Role",
    "TestTimeRegisters",
    "TokenLayout",
    "TokenSpan",
    "Trace",
    "ablate",
    "errors",
    "find_register_neurons",
    "load_model",
    "merge",
    "record",
    "test_time_registers",
]
