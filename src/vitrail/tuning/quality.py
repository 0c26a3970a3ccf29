"""Qualities of a merged model: per-image comparisons with the unmerged model, without labels or with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InvalidOption

Compare = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From outputs (B, …), the unmerged model's outputs and labels (B,) to one number per image (B,)."""


@dataclass(frozen=True)
class Quality:
    """A number per image that compares a merged model with the unmerged one.

    Attributes:
        name: its name in options and results.
        compare: computes it.
        higher: whether higher is better, so that a tolerance is a lower bound.
        share: whether each image counts 0 or 1, so that the mean is a share of images.
        dense: whether it compares the tokens after the last block instead of the model's output.
        labeled: whether it needs labels.
        logits: whether the output is taken as logits of classes.
    """

    name: str
    compare: Compare
    higher: bool
    share: bool = False
    dense: bool = False
    labeled: bool = False
    logits: bool = False

    def meets(self, value: float, bound: float) -> bool:
        """Return whether a mean over images is within a tolerance."""
        return value >= bound if self.higher else value <= bound


def _agreement(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
    return (output.argmax(-1) == reference.argmax(-1)).double()


def _kl(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
    p = reference.double().log_softmax(-1)
    return (p.exp() * (p - output.double().log_softmax(-1))).sum(-1)


def _cosine(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
    return F.cosine_similarity(output.flatten(1).double(), reference.flatten(1).double(), dim=1)


def _relative_error(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
    a, b = output.flatten(1).double(), reference.flatten(1).double()
    return (a - b).norm(dim=1) / b.norm(dim=1)


def _lost_accuracy(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
    assert labels is not None
    return (reference.argmax(-1) == labels).double() - (output.argmax(-1) == labels).double()


QUALITIES: dict[str, Quality] = {
    one.name: one
    for one in (
        Quality("agreement", _agreement, higher=True, share=True, logits=True),
        Quality("kl", _kl, higher=False, logits=True),
        Quality("cosine", _cosine, higher=True),
        Quality("dense_error", _relative_error, higher=False, dense=True),
        Quality("accuracy_loss", _lost_accuracy, higher=False, labeled=True, logits=True),
    )
}
"""Qualities by name: share of images with the same top-1 class, KL divergence from the unmerged model's classes, cosine
of the outputs, relative error of the tokens after the last block, and accuracy lost on labeled images."""


@dataclass(frozen=True)
class Tolerance:
    """A quality and the bound that its mean over images must meet."""

    quality: Quality
    bound: float

    @classmethod
    def parse(cls, within: Any) -> Tolerance:
        """Return the tolerance for ``"agreement 0.99"``, ``("agreement", 0.99)``, or ``(function, 0.01)``.

        A function gets outputs (B, …) and labels (B,) or None, and returns one score per image, higher is better; the
        bound is then the largest mean loss against the unmerged model.
        """
        if isinstance(within, Tolerance):
            return within
        parts = within.split() if isinstance(within, str) else list(within) if isinstance(within, tuple | list) else []
        quality = as_quality(parts[0]) if len(parts) == 2 else None
        try:
            bound = float(parts[1]) if len(parts) == 2 else math.nan
        except (TypeError, ValueError):
            bound = math.nan
        if quality is None or not math.isfinite(bound):
            raise InvalidOption(
                f"within is a quality and a bound, such as 'agreement 0.99', with one of {', '.join(QUALITIES)} or a "
                f"function of outputs and labels; got {within!r}"
            )
        limit = 1.0 if quality.share or quality.name == "cosine" else math.inf
        if not 0 <= bound <= limit or isinstance(parts[1], bool):
            raise InvalidOption(f"the bound of {quality.name} is from 0 to {limit:g}; got {parts[1]!r}")
        return cls(quality, bound)


def as_quality(quality: Any) -> Quality:
    """Return a quality by name, or one that compares a user's score with the unmerged model's."""
    if isinstance(quality, Quality):
        return quality
    if callable(quality):

        def loss(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
            before, after = (_scores(quality, outputs, labels) for outputs in (reference, output))
            return before - after

        return Quality(getattr(quality, "__name__", "score"), loss, higher=False)
    if not isinstance(quality, str) or quality not in QUALITIES:
        raise InvalidOption(f"a quality is one of {', '.join(QUALITIES)}, or a function; got {quality!r}")
    return QUALITIES[quality]


def _scores(score: Callable[[Tensor, Tensor | None], Any], output: Tensor, labels: Tensor | None) -> Tensor:
    found = torch.as_tensor(score(output, labels)).detach().double().cpu()
    if found.shape != output.shape[:1]:
        raise InvalidOption(
            f"the score returns one number per image, of shape {tuple(output.shape[:1])}; got {tuple(found.shape)}"
        )
    return found


def of_tasks(compare: Compare, sizes: Sequence[int], *, share: bool) -> Compare:
    """Return a comparison of logits of several tasks side by side, with so many classes each.

    A share is that of images on which it holds for every task; other comparisons are summed over the tasks.
    """

    def compared(output: Tensor, reference: Tensor, labels: Tensor | None) -> Tensor:
        pairs = zip(output.split(list(sizes), -1), reference.split(list(sizes), -1), strict=True)
        found = torch.stack([compare(*pair, labels) for pair in pairs])
        return found.amin(0) if share else found.sum(0)

    return compared


def divergence(quality: Quality) -> Compare:
    """Return a smooth comparison to search by: few images tell more by it than by a share of images."""
    return _kl if quality.logits else _relative_error


def is_positive(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
