"""Changes to existing models: checked before anything is touched, and all of them reversible."""

from vitrail.surgery.merge import Merging, merge
from vitrail.surgery.record import Recording, record
from vitrail.surgery.trace import Trace

__all__ = ["Merging", "Recording", "Trace", "merge", "record"]
