"""Reductions that keep some tokens and drop others, and the scores they decide by.

Shapes: B batch, N tokens, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import UnsupportedModel
from vitrail.merging.assignment import Assignment
from vitrail.merging.method import Context, ModelShape, Reduction
from vitrail.merging.methods._groups import positions_like, sizes_of, targets_of, work_dtype


def require_class_token(label: str, shape: ModelShape) -> None:
    """Raise ``UnsupportedModel`` for models without class token."""
    if shape.class_token is None:
        raise UnsupportedModel(
            f"method {label} decides by the attention of the class token, and this model has none; use a model with a "
            "class token, or a method without this need, such as 'tome'"
        )


def class_attention(context: Context) -> Tensor:
    """Return the attention weights of the class token in every head (B, H, N), in float32 or better."""
    if context.class_token is None:
        raise UnsupportedModel("the attention of the class token was requested, and this model has no class token")
    weights = context.attention([context.class_token]).squeeze(2)
    return weights.to(work_dtype(weights))


def keep_only(context: Context, kept: Tensor, stand_in: Tensor, removed: int | None) -> Reduction:
    """Return the reduction that drops all mergeable tokens but the ``kept`` ones (B, N).

    Args:
        stand_in: position (B, N) of the kept token from which each dropped one is restored.
        removed: number of tokens that every image loses; None where images differ, and are padded behind.
    """
    length, position = context.x.shape[1], positions_like(kept)
    stays = kept | ~context.mergeable
    leader = torch.where(stays, position, stand_in)
    weight = stays * sizes_of(context).detach()
    if removed is not None:
        return Reduction(Assignment(targets_of(leader), length - removed), weight=weight)
    present = context.present
    count = (stays if present is None else stays & present).sum(1, keepdim=True)
    most = int(count.max())
    target = targets_of(leader)
    if present is not None:  # padding stands behind all others, and so do its groups
        target = torch.where(present, target, count.clamp(max=most - 1))
    return Reduction(Assignment(target, most), weight=weight)
