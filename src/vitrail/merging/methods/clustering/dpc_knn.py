"""DPC-KNN: density peaks become centers, and all other tokens join the nearest one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.features import Features, check_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods._groups import finite_features, positions_like, rank_among, targets_of


@register_method("dpc_knn")
class DPCKNN(Method):
    """Cluster the tokens around density peaks (Du et al., 2016; for tokens: TCFormer, Zeng et al., CVPR 2022).

    The density of a token is exp(−mean of d² to its nearest neighbors), δ its distance to the nearest denser token (for
    the densest: to the farthest one). Tokens with the largest δ · density are centers, and every other token joins the
    nearest center. d² is the mean over channels, so that densities do not underflow.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        neighbors: number of nearest neighbors.
    """

    def __init__(self, features: Features = "tokens", neighbors: int = 5) -> None:
        super().__init__()
        self.features = check_features(features)
        if isinstance(neighbors, bool) or not isinstance(neighbors, int) or neighbors < 1:
            raise InvalidOption(f"neighbors is a whole number of 1 or more; got {neighbors!r}")
        self.neighbors = neighbors

    @property
    def options(self) -> dict[str, Any]:
        given = {"features": self.features, "neighbors": self.neighbors}
        return {name: value for name, value in given.items() if value != {"features": "tokens", "neighbors": 5}[name]}

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        with torch.autocast(context.x.device.type, enabled=False):
            features = finite_features(context, self.features)
            free = context.mergeable.expand(features.shape[:2])
            squared = squared_distances(features)
            centers = rank_among(peak_scores(squared, free, self.neighbors), free) < free.sum(1, keepdim=True) - r
            centers = centers & free
            nearest = squared.masked_fill(~centers.unsqueeze(1), torch.inf).argmin(2)
            leader = torch.where(centers | ~free, positions_like(free), nearest)
            return Reduction(Assignment(targets_of(leader), free.shape[1] - r))

    def flops(self, tokens: int, head_width: int) -> int:
        return tokens * tokens * head_width


def squared_distances(features: Tensor) -> Tensor:
    """Return the mean squared difference over channels of all pairs of tokens (B, N, N)."""
    features = features - features.mean(1, keepdim=True)  # smaller numbers: their differences are more exact
    norms = features.square().mean(-1)
    products = features @ features.transpose(1, 2) / features.shape[-1]
    products = (products + products.transpose(1, 2)) / 2  # the same in both directions, to the last bit
    return (norms.unsqueeze(1) + norms.unsqueeze(2) - 2 * products).clamp(min=0)


def peak_scores(squared: Tensor, free: Tensor, neighbors: int) -> Tensor:
    """Return log(δ · density) of every token (B, N), for free tokens among each other."""
    position = torch.arange(free.shape[1], device=free.device)
    pairs = free.unsqueeze(1) & free.unsqueeze(2)
    others = squared.masked_fill(~pairs | (position == position.unsqueeze(1)), torch.inf)
    nearest = others.topk(min(neighbors, free.shape[1] - 1), largest=False).values
    found = nearest.isfinite()
    log_density = -nearest.masked_fill(~found, 0).sum(2) / found.sum(2).clamp(min=1)
    here, other = log_density.unsqueeze(2), log_density.unsqueeze(1)
    denser = pairs & ((other > here) | ((other == here) & (position < position.unsqueeze(1))))
    delta = squared.masked_fill(~denser, torch.inf).amin(2)
    farthest = squared.masked_fill(~pairs, 0).amax(2)
    delta = torch.where(delta.isfinite(), delta, farthest).clamp(min=torch.finfo(squared.dtype).tiny)
    return delta.log() / 2 + log_density  # δ is a distance: the root of d²
