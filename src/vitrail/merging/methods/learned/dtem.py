"""DTEM: features for matching, decoupled from the model and trained by a relaxed merge (Lee & Hong, NeurIPS 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.merging.method import register_method
from vitrail.merging.methods.learned._matching import SCALE, LearnedMatching, candidates, relaxed_top

TEMPERATURE = 0.1


@register_method("dtem")
class DTEM(LearnedMatching):
    """ToMe by learned features, trained by a relaxation of the r best pairs.

    One linear layer per block computes features from the detached input of its attention: as many channels as one
    head has, or two heads in models of width 1024 and more. In training mode the three best partners of every token
    are candidates, and r softmax steps of temperature 0.1 over all of them relax the choice of r pairs.

    Published: only the linear layers train, with the model frozen, by cross-entropy: AdamW at 1e-4, 30 epochs.

    Args:
        reconstruction: weight of the reconstruction loss; see `LearnedMatching`. The published method has none.
    """

    def pick(self, scores: Tensor, r: int) -> Tensor:
        best, odd = candidates(scores)
        return torch.zeros_like(scores).scatter(2, odd, relaxed_top(best / SCALE, r, TEMPERATURE))
