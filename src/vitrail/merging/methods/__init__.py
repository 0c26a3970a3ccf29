"""Merging methods, one file each. A new method is a file here and an import below, which registers it."""

from vitrail.merging.methods.prune import Prune
from vitrail.merging.methods.random import Random
from vitrail.merging.methods.tome import ToMe

__all__ = ["Prune", "Random", "ToMe"]
