"""Merging methods, one file each, in folders by kind. Importing a file registers its method."""

from vitrail.merging.methods import clustering, content, dynamic, learned, pairs, pruning
from vitrail.merging.methods.pruning import Prune
from vitrail.merging.methods.random import Random
from vitrail.merging.methods.tome import ToMe

__all__ = ["Prune", "Random", "ToMe", "clustering", "content", "dynamic", "learned", "pairs", "pruning"]
