"""Choose a merge on the user's own images: the largest within a tolerance, or the best within a budget."""

from vitrail.tuning.quality import QUALITIES, Quality, Tolerance
from vitrail.tuning.result import Candidate, Tuning
from vitrail.tuning.search import SEARCHES
from vitrail.tuning.tuner import tune

__all__ = ["QUALITIES", "SEARCHES", "Candidate", "Quality", "Tolerance", "Tuning", "tune"]
