"""Changes to existing models: checked before anything is touched, and all of them reversible."""

from vitrail.surgery.merge import Merging, merge
from vitrail.surgery.trace import Trace

__all__ = ["Merging", "Trace", "merge"]
