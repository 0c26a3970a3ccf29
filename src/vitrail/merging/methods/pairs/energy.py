"""Energy: PiToMe (Tran et al., NeurIPS 2024), which merges only the most redundant tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, protected_mask
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method
from vitrail.merging.methods.pairs._pairs import half_of_the_free, limit


@register_method("energy")
class Energy(Method):
    """Merge the r tokens of highest energy, which have many similar tokens; isolated tokens stay.

    The energy of a token is the mean of ELU(cos − m) over all tokens that may merge, with a margin m that falls
    linearly over depth. In descending order of energy, 2r tokens alternate into A and B, and every token of A merges
    into its most similar token of B. Tokens of low energy, such as those of small objects, never merge.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        margin: margin of the first block; block l of L uses ``margin · (1 − l/L)``.
    """

    places_groups = True
    takes_padding = True

    def __init__(self, features: Features = "keys", margin: float = 0.75) -> None:
        super().__init__()
        self.features = check_features(features)
        if not is_number(margin) or not -1 <= margin <= 1:
            raise InvalidOption(f"margin is a cosine, a number from -1 to 1 such as 0.75; got {margin!r}")
        self.margin = float(margin)

    @property
    def options(self) -> dict[str, Any]:
        given = {"features": self.features, "margin": self.margin}
        return {name: value for name, value in given.items() if value != {"features": "keys", "margin": 0.75}[name]}

    def capacity(self, tokens: int, protected: Protected) -> int:
        return half_of_the_free(tokens, protected)

    @torch.no_grad()
    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        pairs = context.matcher.pairs(compute_features(context, self.features))
        batch, length = context.x.shape[:2]
        free = context.mergeable.expand(batch, length)
        count = limit(r, free.sum(1) // 2, context.present)
        margin = self.margin * (1 - context.layer / context.depth)
        energy = pairs.affinity(margin, free) / free.sum(1, keepdim=True).clamp(min=1)
        place = context.matcher.rank(energy.masked_fill(~free, float("-inf")))
        chosen = place < 2 * (count if isinstance(count, int) else count.unsqueeze(1))
        source, destination = chosen & (place % 2 == 0), chosen & (place % 2 == 1)
        partner = pairs.nearest(destination)
        group = torch.where(source, partner, torch.arange(length, device=partner.device))
        mask = protected_mask(context.protected, length, group.device)
        return Reduction(context.matcher.place_groups(group, mask, context.present, count))

    def flops(self, tokens: int, head_width: int) -> int:
        return tokens * tokens * head_width
