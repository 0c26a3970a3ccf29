"""Merging methods, one file each. Importing this package registers them."""

from vitrail.merging.methods.prune import Prune
from vitrail.merging.methods.random import Random
from vitrail.merging.methods.tome import ToMe

__all__ = ["Prune", "Random", "ToMe"]
