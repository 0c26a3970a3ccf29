"""Functions that methods share: comparable scores, places on the grid, and index maps from leaders of groups.

Shapes: B batch, N tokens, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.merging.bipartite import rank
from vitrail.merging.features import Features, compute_features
from vitrail.merging.method import Context


def work_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of decisions, weights and sizes: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def finite_features(context: Context, features: Features) -> Tensor:
    """Return features (B, N, D) to decide by: detached, in float32 or better, 0 where they are NaN.

    A broken image in a batch then never changes how many tokens are left.
    """
    found = compute_features(context, features).detach()
    return found.to(work_dtype(found)).nan_to_num(0.0)


def unit_features(context: Context, features: Features) -> Tensor:
    """Return :func:`finite_features` scaled to length 1, so that their dot products are cosines."""
    return F.normalize(finite_features(context, features), dim=-1)


def sizes_of(context: Context) -> Tensor:
    """Return the sizes of the tokens (B, N) in float32 or better, also while all are 1."""
    work = work_dtype(context.x)
    if context.size is None:
        return torch.ones(context.x.shape[:2], dtype=work, device=context.x.device)
    return context.size.to(work)


PLACES = "vitrail_places"
"""Name of the memory that holds the row and column of each token."""


def grid_places(context: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the row and column of each token (B, N, 2), and the memory that carries them to the next block.

    A merged token is at the mean of its members; special tokens are at 0. Frames of a video lie on top of each other.
    Return the second result as, or within, ``Reduction.memory``; it is empty once the pass carries it.
    """
    if PLACES in context.memory:
        return context.memory[PLACES], {}
    t, h, w = context.grid
    batch, tokens = context.x.shape[:2]
    grid = torch.cartesian_prod(*(torch.arange(side, device=context.x.device) for side in (h, w))).repeat(t, 1)
    places = F.pad(grid.to(work_dtype(context.x)), (0, 0, tokens - len(grid), 0)).expand(batch, -1, -1)
    return places, {PLACES: places}


def positions_like(target: Tensor) -> Tensor:
    """Return the position of every token, in the shape (B, N) of ``target``."""
    return torch.arange(target.shape[1], device=target.device).expand(target.shape[:2])


def rank_among(scores: Tensor, candidates: Tensor) -> Tensor:
    """Return the rank of each candidate by score (B, N), 0 for the largest; ties go to the lower index.

    All others rank behind the candidates. Scores that are not finite count as the lowest or highest finite one.
    """
    scores = scores.detach().to(work_dtype(scores))
    low, high = torch.finfo(scores.dtype).min, torch.finfo(scores.dtype).max
    return rank(scores.nan_to_num(low, high, low).masked_fill(~candidates, -torch.inf))


def targets_of(leader: Tensor) -> Tensor:
    """Return the group of every token, given the position (B, N) of the token that leads its group.

    Groups stand in the order of their leaders, which lead themselves.
    """
    place = (leader == positions_like(leader)).long().cumsum(1) - 1
    return place.gather(1, leader)


def most_similar(unit: Tensor, candidates: Tensor) -> Tensor:
    """Return the position (B, N) of the candidate with the largest cosine to each token; ties go to the lower index."""
    scores = unit @ unit.transpose(1, 2)
    return scores.masked_fill(~candidates.unsqueeze(1), -torch.inf).argmax(2)
