"""vid-TLDR (Choi et al., CVPR 2024): background tokens merge without adding anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, front_edges, mask_edges
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods.content.importance import attention_entropy, min_max


@register_method("vid_tldr")
class VidTLDR(Method):
    """Merge ToMe's pairs in the first layers, each source by its saliency, so that background adds nothing.

    The saliency is the sharpness of a token's attention, ``Σ_j a_ij·log a_ij``, scaled to 0 … 1 in each image; below
    its mean it is 0, above it ``(s − mean) / (1 − mean)``. A source enters its group with ``saliency·size``.

    Args:
        first: number of first layers that merge, unless the caller gives a schedule.
        features: features to compare; see ``vitrail.merging.FEATURES``.
    """

    places_groups = True
    takes_padding = True

    def __init__(self, first: int = 4, *, features: Features = "tokens") -> None:
        super().__init__()
        if not is_int(first, 1):
            raise InvalidOption(f"first is the number of first layers that merge, 1 or more; got {first!r}")
        self.first, self.features = first, check_features(features)

    @property
    def options(self) -> dict[str, Any]:
        values = {"first": self.first, "features": self.features}
        defaults = {"first": 4, "features": "tokens"}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def layers(self, depth: int) -> Sequence[float]:
        return [float(layer < self.first) for layer in range(depth)]

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        features = compute_features(context, self.features)
        step = context.match(features, r)
        saliency = background_to_zero(attention_entropy(context), context.mergeable)
        present = context.present
        ones = torch.ones_like(step.target) if present is None else present.long()
        members = step.merge_sizes(ones).gather(1, step.target)
        destination = torch.arange(step.target.shape[1], device=members.device) % 2 == 1
        weight = torch.where((members == 1) | destination, 1, saliency)
        return Reduction(step, weight=weight if context.size is None else weight * context.size)

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width


def background_to_zero(values: Tensor, among: Tensor) -> Tensor:
    """Return values (B, N) scaled to 0 … 1 among some tokens; 0 below the mean, then rising to 1."""
    scaled = min_max(values, among)
    count = among.expand(scaled.shape).sum(1, keepdim=True)
    mean = scaled.sum(1, keepdim=True) / count.clamp(min=1)
    return ((scaled - mean) / torch.where(mean < 1, 1 - mean, 1)).clamp(min=0)
