"""The base of methods that match tokens by learned features, trained by a soft merge of all tokens.

Shapes: B batch, N tokens, A/C tokens at even / odd positions, D channels, K candidates of each even token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import Protected, front_edges, mask_edges, protected_mask, similarity
from vitrail.merging.method import Context, ModelShape, Reduction
from vitrail.merging.methods._groups import positions_like, sizes_of, work_dtype
from vitrail.merging.methods.learned._learned import LearnedMethod, check_weight

WIDE = 1024
"""Width of a model from which features have the channels of two heads."""

CANDIDATES = 3
SCALE = 0.1
"""Cosines are divided by this before one is selected."""

_LEAST = 1e-20
"""Size of a token that has merged completely: invisible to others, and its own value stays defined."""

_REMOVED, _SOFT = "removed", "soft"


class LearnedMatching(LearnedMethod):
    """Match tokens as ToMe does, by features that a linear layer per block computes from the input of its attention.

    In training mode no token leaves. The tokens that the plan would leave are the *effective* ones: those at even
    positions give shares of their size to those at odd positions, as :meth:`pick` decides, which makes the result
    differentiable in the features. Then tokens are sorted by size, and the next block has r effective tokens less.
    The last tokens are restored by the same shares. In eval mode ToMe's matching merges r pairs.

    Subclasses implement :meth:`pick`, or :meth:`share`.

    Args:
        reconstruction: weight of the reconstruction loss. For every block it is the squared error of the tokens, merged
            and restored, relative to their variance, by size; gradients reach the features of this block alone.
    """

    places_groups = True

    def __init__(self, reconstruction: float = 0.0) -> None:
        super().__init__()
        self.reconstruction = check_weight("reconstruction", reconstruction)

    @property
    def options(self) -> dict[str, Any]:
        return {"reconstruction": self.reconstruction} if self.reconstruction else {}

    @property
    def twin(self) -> str | None:
        return None if self.training else "features"

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        width = shape.head_width * (2 if shape.width >= WIDE else 1)
        return {"metric": nn.ModuleList(nn.Linear(shape.width, width) for _ in range(shape.depth))}

    def features(self, context: Context) -> Tensor:
        """Return the features (B, N, width) of a block; gradients reach its linear layer alone."""
        found: Tensor = self.get_submodule(f"metric.{context.layer}")(context.normed.detach())
        return found

    def matched(self, context: Context) -> Tensor:
        return self.features(context).unsqueeze(1)

    def pick(self, scores: Tensor, r: int) -> Tensor:
        """Return the share (B, A, C) of each even token that merges into each odd one, given cosines; −inf: none."""
        raise NotImplementedError(f"{type(self).__name__} does not implement pick(scores, r)")

    def share(self, context: Context, scores: Tensor, blocked: Tensor, r: int) -> tuple[Tensor, int | Tensor]:
        """Return the shares of :meth:`pick`, and by how many tokens the next block has less."""
        return self.pick(scores, r), r

    @torch.no_grad()
    def select(self, context: Context, r: int | Tensor) -> Reduction:
        return Reduction(context.match(self.features(context), r))

    def relax(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        features, size = self.features(context), sizes_of(context)
        batch, length = size.shape
        removed = context.archive.get(_REMOVED, torch.zeros((), dtype=torch.long, device=size.device))
        with torch.autocast(size.device.type, enabled=False):
            effective = torch.arange(length, device=size.device) < length - removed
            blocked = ~(context.mergeable & effective).expand(batch, -1)
            scores = similarity(features.to(work_dtype(features)), blocked)
            given, count = self.share(context, scores, blocked, r)
            soft = shares_of(given.to(size.dtype), length)

            after = (soft.detach() * size.detach().unsqueeze(2)).sum(1)
            first = protected_mask(context.protected, length, size.device)
            order = after.masked_fill(first, torch.inf).argsort(dim=1, descending=True, stable=True)
            target = torch.zeros_like(order).scatter(1, order, positions_like(order))
            soft = soft.gather(2, order.unsqueeze(1).expand(-1, length, -1))
            before = context.archive.get(_SOFT)
            composed = soft if before is None else _extend(before, length) @ soft
            if self.reconstruction:
                self.add_loss(context, self.reconstruction * reconstruction_error(context.x, size, soft))
        archive = {_REMOVED: removed + count, _SOFT: composed}
        return Reduction(Assignment(target, length), weight=size, soft=soft, archive=archive)

    def restore(
        self, x: Tensor, assignment: Assignment, memory: Mapping[str, Tensor], archive: Mapping[str, Tensor]
    ) -> Tensor:
        copied = assignment.unmerge(x)
        if _SOFT not in archive:
            return copied
        shares = _extend(archive[_SOFT], x.shape[1])
        others = shares - F.one_hot(assignment.target, assignment.length)  # 0 for tokens that are alone: exact copies
        return copied + others.to(x.dtype) @ x

    def flops(self, tokens: int, head_width: int) -> int:
        layer = next((part for part in self.modules() if isinstance(part, nn.Linear)), None)
        width, channels = (head_width, 0) if layer is None else (layer.out_features, layer.in_features)
        return tokens * channels * width + ((tokens + 1) // 2) * (tokens // 2) * width


def candidates(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best cosines (B, A, K) of each even token, and which odd tokens they are with."""
    best, odd = scores.sort(dim=2, descending=True, stable=True)
    return best[..., :CANDIDATES], odd[..., :CANDIDATES]


def relaxed_top(logits: Tensor, r: int, temperature: float) -> Tensor:
    """Return a relaxation of the r best rows of (B, A, K): shares whose rows sum to at most 1, and all to about r.

    One entry is drawn r times by a softmax over all; after each draw its row gets less likely.
    """
    total = torch.zeros_like(logits)
    least = torch.finfo(torch.float32).eps
    for _ in range(r):
        drawn = (logits / temperature).flatten(1).softmax(1).view_as(logits)
        total = total + drawn
        logits = logits + (1 - drawn.sum(2, keepdim=True)).clamp(min=least).log()
    return total / total.detach().sum(2, keepdim=True).clamp(min=1)


def shares_of(given: Tensor, length: int) -> Tensor:
    """Return the share of every token (B, N, N) that goes to every token, given those of even to odd ones."""
    rest = 1 - given.sum(2)
    stay = given.new_ones(given.shape[0], length)
    stay[:, ::2] = rest + (_LEAST - rest).clamp(min=0).detach()  # gradients pass also where nothing is left
    soft = torch.diag_embed(stay)
    soft[:, ::2, 1::2] = given
    return soft


def reconstruction_error(x: Tensor, size: Tensor, soft: Tensor) -> Tensor:
    """Return the squared error of tokens that merge and are restored, relative to the tokens' variance, by size.

    Args:
        soft: share (B, N, M) of each token that goes to each merged one.
    """
    x, size = x.detach().to(soft.dtype), size.detach().unsqueeze(2)
    mass = soft * size
    merged = (mass / mass.sum(1, keepdim=True).clamp(min=_LEAST)).transpose(1, 2) @ x
    mean = (size * x).sum(1, keepdim=True) / size.sum(1, keepdim=True)
    error, variance = ((size * (other - x).square()).sum((1, 2)) for other in (soft @ merged, mean))
    return (error / variance.clamp(min=torch.finfo(x.dtype).tiny)).mean()


def _extend(shares: Tensor, length: int) -> Tensor:
    """Return shares (B, N, N) for sequences that special tokens have entered in front."""
    late = length - shares.shape[2]
    if not late:
        return shares
    padded = F.pad(shares, (late, 0, late, 0))
    entered = torch.arange(length, device=shares.device) < late
    return padded + torch.diag(entered.to(shares.dtype))
