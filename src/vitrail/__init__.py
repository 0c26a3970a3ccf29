"""Vitrail: tokens of Vision Transformers, with roles, merged, and seen.

The public names are these; importing them loads torch and nothing optional.
"""

from vitrail import errors
from vitrail.adapters import load_model
from vitrail.merging import Assignment
from vitrail.surgery import Merging, Recording, Trace, merge, record
from vitrail.tokens import Role, TokenLayout, TokenSpan

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "Merging",
    "Recording",
    "Role",
    "TokenLayout",
    "TokenSpan",
    "Trace",
    "errors",
    "load_model",
    "merge",
    "record",
]
