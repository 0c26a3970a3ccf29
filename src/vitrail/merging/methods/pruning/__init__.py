"""Methods that drop tokens instead of merging them, or fuse them into one."""

from vitrail.merging.methods.pruning.evit import EViT
from vitrail.merging.methods.pruning.prune import Prune

__all__ = ["EViT", "Prune"]
