"""What methods that compare all pairs of tokens share."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.merging.bipartite import Protected


def half_of_the_free(tokens: int, protected: Protected) -> int:
    """Return half of the tokens that may merge, rounded down; for a mask, in the image with the fewest."""
    if isinstance(protected, int):
        return max(0, (tokens - protected) // 2)
    return int((~protected).sum(1).min()) // 2


def limit(r: int | Tensor, most: Tensor, present: Tensor | None) -> int | Tensor:
    """Return ``r``, per image (B,) and at most ``most`` where images may differ."""
    if isinstance(r, int) and present is None:
        return r
    return torch.as_tensor(r, device=most.device).minimum(most)
