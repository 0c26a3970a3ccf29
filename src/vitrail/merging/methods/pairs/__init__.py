"""Methods that merge pairs of similar tokens, with other scores than ToMe's."""

from vitrail.merging.methods.pairs.energy import Energy
from vitrail.merging.methods.pairs.grid import Grid
from vitrail.merging.methods.pairs.mctf import MCTF
from vitrail.merging.methods.pairs.mlerp import MLERP
from vitrail.merging.methods.pairs.mutual import Mutual

__all__ = ["MCTF", "MLERP", "Energy", "Grid", "Mutual"]
