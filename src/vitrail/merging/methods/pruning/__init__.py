"""Methods that drop tokens instead of merging them."""

from vitrail.merging.methods.pruning.prune import Prune

__all__ = ["Prune"]
