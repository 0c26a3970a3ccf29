"""DTEM's training with sampled instead of relaxed merges: Gumbel top-k with straight-through gradients."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import rank
from vitrail.merging.method import register_method
from vitrail.merging.methods.learned._matching import SCALE, LearnedMatching, candidates, relaxed_top


@register_method("gumbel")
class Gumbel(LearnedMatching):
    """ToMe by learned features, trained by sampled merges.

    As `DTEM`, but in training mode exactly r pairs merge: Gumbel noise is added to the cosines, divided by 0.1, and the
    r best pairs are sampled without replacement. Gradients are those of the relaxed choice at ``temperature``
    (straight-through). The model sees in training what it sees in eval mode, at the price of noisier gradients.

    Args:
        temperature: that of the softmax whose gradients are used; lower is closer to the sample, and noisier.
        reconstruction: weight of the reconstruction loss; see `LearnedMatching`.
    """

    def __init__(self, temperature: float = 1.0, reconstruction: float = 0.0) -> None:
        super().__init__(reconstruction)
        valid = isinstance(temperature, Real) and not isinstance(temperature, bool) and 0 < temperature < math.inf
        if not valid:
            raise InvalidOption(f"temperature is a number above 0, by default 1.0; got {temperature!r}")
        self.temperature = float(temperature)

    @property
    def options(self) -> dict[str, Any]:
        own = {} if self.temperature == 1.0 else {"temperature": self.temperature}
        return {**own, **super().options}

    def noise(self, like: Tensor) -> Tensor:
        """Return Gumbel noise in the shape of a tensor."""
        return -torch.empty_like(like).exponential_().log()

    def pick(self, scores: Tensor, r: int) -> Tensor:
        best, odd = candidates(scores)
        logits = best / SCALE
        logits = logits + self.noise(logits)
        value, column = logits.max(2)
        merges = (rank(value.detach()) < r) & value.isfinite()
        sampled = F.one_hot(column, logits.shape[2]) * merges.unsqueeze(2)
        relaxed = relaxed_top(logits, r, self.temperature)
        return torch.zeros_like(scores).scatter(2, odd, sampled + (relaxed - relaxed.detach()))
