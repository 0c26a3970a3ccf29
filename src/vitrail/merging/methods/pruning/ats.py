"""ATS: adaptive token sampling (Fayyaz et al., ECCV 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.merging.method import Context, Method, ModelShape, Reduction, register_method
from vitrail.merging.methods._groups import positions_like
from vitrail.merging.methods.pruning._keep import class_attention, keep_only, require_class_token


@register_method("ats")
class ATS(Method):
    """Sample tokens at even quantiles of their significance; images keep different numbers of tokens.

    The significance of a token is the attention of the class token to it times the norm of its value, summed over heads
    and normalized. Of its cumulative distribution, K even quantiles are read: each falls to one token, and tokens to
    which at least one falls stay. With ``r``, ``keep`` or ``gflops``, K is the planned number of tokens, so that at
    least ``r`` are removed; otherwise K is the number of tokens.

    The position of a dropped token is restored from the token to which the quantile nearest to its own falls.

    By default it starts after a quarter of the blocks.
    """

    static = False

    def check(self, shape: ModelShape) -> None:
        require_class_token(self.label, shape)

    def layers(self, depth: int) -> Sequence[float]:
        return [float(layer >= depth // 4) for layer in range(depth)]

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        score = significance(context)
        free = context.mergeable.expand(score.shape)
        count = free.sum(1)
        samples = (count if context.planned is None else count - r).clamp(min=1)
        kept, stand_in = sample(score.masked_fill(~free, 0), free, samples)
        return keep_only(context, kept, stand_in, None)


def significance(context: Context) -> Tensor:
    """Return attention of the class token times norm of the value, summed over heads (B, N)."""
    attention = class_attention(context)
    norms = context.v.to(attention.dtype).norm(dim=-1)
    groups = attention.shape[1] // norms.shape[1]  # with grouped queries, several heads share a value
    score: Tensor = (attention * norms.repeat_interleave(groups, 1)).sum(1)
    score = score.nan_to_num(0.0, torch.finfo(score.dtype).max ** 0.5, 0.0)
    return score


def sample(score: Tensor, free: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Read the inverse of each image's cumulative distribution at ``samples`` (B,) even quantiles.

    Returns which tokens of (B, N) are sampled, and the position of the sampled token that stands for each.

    Args:
        score: significance, 0 for tokens that are not ``free``.
    """
    score = torch.where(score.sum(1, keepdim=True) > 0, score, free.to(score.dtype))
    upper = score.cumsum(1)
    total, most = upper[:, -1:], int(samples.max())
    index = torch.arange(most, device=score.device)
    quantiles = (index + 0.5) / samples.unsqueeze(1) * total
    # the last free token has the largest upper bound, so that no quantile falls behind it
    token = torch.searchsorted(upper.contiguous(), quantiles.contiguous())
    last = torch.where(free, positions_like(free), 0).amax(1, keepdim=True)
    token = torch.minimum(token, last)
    drawn = index < samples.unsqueeze(1)
    kept = torch.zeros_like(score).scatter_add(1, token, drawn.to(score.dtype)) > 0
    middle = (upper - score / 2) / total.clamp(min=torch.finfo(score.dtype).tiny)
    nearest = (middle * samples.unsqueeze(1)).floor().long().clamp(min=0)
    nearest = torch.minimum(nearest, samples.unsqueeze(1) - 1)
    return kept & free, token.gather(1, nearest)
