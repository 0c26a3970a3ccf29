"""The kernels as operators for ``torch.compile`` and autograd, with fake implementations and gradients.

Triton is imported when an operator first runs, not with Vitrail.
"""

from vitrail.kernels.ops.attention import (
    attend,
    attend_back,
    attend_keep,
    attend_packed,
    attend_packed_back,
    attention_received,
    unpack,
)
from vitrail.kernels.ops.base import Operator
from vitrail.kernels.ops.groups import (
    best,
    best_given,
    best_members,
    first_members,
    list_members,
    pairs,
    place,
    ranks,
    settle,
    strongest_between,
)
from vitrail.kernels.ops.merging import (
    add_norm,
    add_scaled,
    match,
    merge,
    merge_back,
    merge_norm,
    norm,
    norm_back,
    norm_residual,
)
from vitrail.kernels.ops.rotary import rotate

__all__ = [
    "Operator", "add_norm", "add_scaled", "attend", "attend_back", "attend_keep", "attend_packed",
    "attend_packed_back", "attention_received", "best", "best_given", "best_members", "first_members", "list_members",
    "match", "merge", "merge_back", "merge_norm", "norm", "norm_back", "norm_residual", "pairs", "place", "ranks",
    "rotate", "settle", "strongest_between", "unpack",
]  # fmt: skip
