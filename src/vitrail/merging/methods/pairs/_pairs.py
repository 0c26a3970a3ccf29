"""What methods that compare all pairs of tokens share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.merging.bipartite import Protected


def cosines(features: Tensor) -> Tensor:
    """Return the cosine of every pair of tokens (B, N, N), in float32 or better.

    Where features are not finite, the pair gets the lowest finite score, so that a broken image in a batch never
    changes how many tokens are left.
    """
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
        cosine = unit @ unit.transpose(1, 2)
        return torch.where(cosine.isnan(), torch.finfo(cosine.dtype).min, cosine)


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
