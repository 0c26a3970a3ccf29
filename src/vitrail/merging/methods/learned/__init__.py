"""Methods with parameters that must be trained."""

from vitrail.merging.methods.learned._learned import PREFIX, LearnedMethod
from vitrail.merging.methods.learned.dtem import DTEM

__all__ = ["DTEM", "PREFIX", "LearnedMethod"]
