"""Restorers: what a merge loses is kept, compressed, and restored at the end; one file each, registered by name."""

from vitrail.merging.restoring.attention import Attention
from vitrail.merging.restoring.base import (
    RESTORERS,
    Copy,
    Exit,
    FitOptions,
    Observe,
    Restorer,
    as_restorer,
    register_restorer,
)
from vitrail.merging.restoring.residual import Residual
from vitrail.merging.restoring.transport import Transport

__all__ = [
    "RESTORERS",
    "Attention",
    "Copy",
    "Exit",
    "FitOptions",
    "Observe",
    "Residual",
    "Restorer",
    "Transport",
    "as_restorer",
    "register_restorer",
]
