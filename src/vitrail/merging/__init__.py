"""Token merging as pure functions and frozen objects on tensors; knows torch and nothing of models."""

from vitrail.merging.assignment import Assignment
from vitrail.merging.attention import proportional_attention
from vitrail.merging.bipartite import match
from vitrail.merging.methods import METHODS
from vitrail.merging.schedule import Room, Schedule, Solution
from vitrail.merging.state import MergeState

__all__ = ["METHODS", "Assignment", "MergeState", "Room", "Schedule", "Solution", "match", "proportional_attention"]
