"""Methods that drop tokens instead of merging them, or fuse them into one."""

from vitrail.merging.methods.pruning.ats import ATS
from vitrail.merging.methods.pruning.avit import AViT
from vitrail.merging.methods.pruning.dynamicvit import DynamicViT
from vitrail.merging.methods.pruning.evit import EViT
from vitrail.merging.methods.pruning.prune import Prune

__all__ = ["ATS", "AViT", "DynamicViT", "EViT", "Prune"]
