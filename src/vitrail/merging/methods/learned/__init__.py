"""Methods with parameters that must be trained."""

from vitrail.merging.methods.learned._learned import PREFIX, LearnedMethod
from vitrail.merging.methods.learned.diffrate import DiffRate
from vitrail.merging.methods.learned.dtem import DTEM
from vitrail.merging.methods.learned.gumbel import Gumbel

__all__ = ["DTEM", "PREFIX", "DiffRate", "Gumbel", "LearnedMethod"]
