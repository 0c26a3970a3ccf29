"""Token merging as pure functions and frozen objects on tensors: torch alone, no knowledge of models.

Method, Context, Reduction      the interface of merging methods; METHODS, register_method, as_method
methods                         ToMe and the controls Random and Prune
FEATURES                        features by which tokens are compared
Assignment, MergeState          the index map of a reduction; sizes and positions of the tokens of one forward pass
Schedule, Room, Solution        how many tokens merge in each layer
match, proportional_attention   bipartite matching; attention that counts a token of size s as s tokens
"""

from vitrail._arguments import fitting
from vitrail.merging import attention, bipartite
from vitrail.merging.assignment import Assignment
from vitrail.merging.features import FEATURES
from vitrail.merging.method import (
    METHODS,
    Context,
    Method,
    ModelShape,
    Reduction,
    as_method,
    list_methods,
    register_method,
)
from vitrail.merging.methods import Prune, Random, ToMe
from vitrail.merging.schedule import Room, Schedule, Solution
from vitrail.merging.state import MergeState

match = fitting(bipartite.match)
proportional_attention = fitting(attention.proportional_attention)

__all__ = [
    "FEATURES",
    "METHODS",
    "Assignment",
    "Context",
    "MergeState",
    "Method",
    "ModelShape",
    "Prune",
    "Random",
    "Reduction",
    "Room",
    "Schedule",
    "Solution",
    "ToMe",
    "as_method",
    "list_methods",
    "match",
    "proportional_attention",
    "register_method",
]
