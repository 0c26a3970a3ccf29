"""Random: the control that merges random pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.features import Features, compute_features
from vitrail.merging.method import Context, Reduction, register_method
from vitrail.merging.methods.tome import ToMe

WIDTH = 16
"""Channels of the seeded features."""


@register_method("random")
class Random(ToMe):
    """Merge r random pairs of the same bipartite matching: the baseline that shows the value of similarity.

    Args:
        features: features whose shape and dtype the random ones have, where no seed is given.
        seed: the same pairs in every pass and for every image, by layer, on every device. None: new pairs for each
            image and pass, from PyTorch's generator (``torch.manual_seed``).
    """

    def __init__(self, features: Features = "keys", seed: int | None = None) -> None:
        super().__init__(features)
        if seed is not None and not is_int(seed, 0):
            raise InvalidOption(f"seed is a whole number of 0 or more, or None; got {seed!r}")
        self.seed = seed

    @property
    def options(self) -> dict[str, Any]:
        return super().options | ({} if self.seed is None else {"seed": self.seed})

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        if self.seed is None:
            noise = torch.randn_like(compute_features(context, self.features).detach())
        else:
            tokens = context.x.shape[1]
            noise = uniform(self.seed, context.layer, tokens * WIDTH, context.x.device)
            noise = noise.view(tokens, WIDTH).expand(len(context.x), -1, -1)
        return Reduction(context.match(noise, r))


def uniform(seed: int, layer: int, count: int, device: torch.device) -> Tensor:
    """Return numbers from −0.5 to 0.5 in float32 that depend on the arguments alone (SplitMix64).

    Whole numbers are equal on all devices, and compile, where generators do neither.
    """
    index = torch.arange(1, count + 1, device=device)
    state = _signed(0x9E3779B97F4A7C15) * index + _signed(((seed << 16) + layer + 1) * 0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 40).float() / (1 << 24) - 0.5


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shift 64 bits to the right, as if without sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """Return the low 64 bits of a whole number as int64 has them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
