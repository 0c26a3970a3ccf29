"""Methods that look at what patches show: salient, moving or bounding patches stay."""

from vitrail.merging.methods.content.edges import Edges
from vitrail.merging.methods.content.importance import IMPORTANCE
from vitrail.merging.methods.content.salient import Salient
from vitrail.merging.methods.content.vid_tldr import VidTLDR

__all__ = ["IMPORTANCE", "Edges", "Salient", "VidTLDR"]
