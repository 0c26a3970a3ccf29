"""Fewer visual tokens for a language model: a projector's output, merged to a number known before the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import VisualTokens
from vitrail.errors import UnsupportedInput
from vitrail.merging import Context, MergeState, ToMe

STEP = 4
"""Each step of a reduction merges at most one token of this many."""


@dataclass(frozen=True)
class Shortening:
    """How many visual tokens a language model receives for each image, and where they come from.

    Attributes:
        tokens: what the model passes without shortening.
        wanted: number of tokens for each image, or the share that is left.
    """

    tokens: VisualTokens
    wanted: int | float

    def length(self, count: int) -> int:
        """Return how many of an image's tokens are left."""
        return min(count, self.wanted) if isinstance(self.wanted, int) else max(1, round(self.wanted * count))

    def mixins(self) -> list[tuple[nn.Module, type]]:
        """Return the modules that change, each with the mixin in front of its class."""
        return [(self.tokens.projector, ShortProjector), (self.tokens.owner, CheckedPrompt)]

    def check(self, call: Mapping[str, Any]) -> None:
        """Raise if a prompt has more placeholders than its images have tokens."""
        ids, images = call.get("input_ids"), call.get("pixel_values")
        if not isinstance(ids, Tensor) or not isinstance(images, Tensor):
            return
        placeholders, count = int((ids == self.tokens.placeholder).sum()), images.shape[:-3].numel()
        length = self.length(self.tokens.count)
        if placeholders > count * length:
            raise UnsupportedInput(
                f"the prompts have {placeholders} placeholders for {count} images, and with "
                f"shorten={self.wanted} each image has {length} tokens; pass the processor's output through "
                "merging.shorten(inputs), or let the processor write that many"
            )


class ShortProjector:
    """Mixin in front of a projector: similar tokens of its output merge."""

    _vitrail_shortening: Shortening

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens: Tensor = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return shorten(tokens, self._vitrail_shortening.length(tokens.shape[1]))


class CheckedPrompt:
    """Mixin in front of the model that puts visual tokens in the places of a prompt's placeholders."""

    _vitrail_shortening: Shortening

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._vitrail_shortening.check(kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def shorten(x: Tensor, length: int) -> Tensor:
    """Merge similar tokens (B, N, D) until ``length`` are left, in the order of their first members.

    Every token is the mean of all that it was merged from. Steps are small, so that no token merges only because its
    neighbors in the matching had to.
    """
    method, state = ToMe(features="tokens"), MergeState((0,))
    while x.shape[1] > length:
        r = min(x.shape[1] - length, max(1, x.shape[1] // STEP))
        reduction = kernels.reduce(method, Context(0, (1, 1, x.shape[1]), x, state.size), r, "original")
        assert reduction is not None
        x, state = state.apply(x, reduction, method)
    return x
