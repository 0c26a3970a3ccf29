"""One answer from several heads."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Literal

import torch
from torch import Tensor

Fuse = Literal["logits", "softmax", "class", "distillation"]

FUSE: tuple[Fuse, ...] = ("logits", "softmax", "class", "distillation")
"""How class and distillation heads become one answer: their mean, the mean of their softmaxes, or one of them alone."""


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Give the mean of tensors of the same shape; of one tensor, itself."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).mean(0)


def mean_of_softmaxes(logits: Sequence[Tensor]) -> Tensor:
    """Give the mean of the softmaxes of logits (B, C) each, as log-probabilities (B, C).

    Their exponentials sum to one. The softmax of log-probabilities is the probabilities, so the largest entry and
    the cross-entropy are those of the mean, without a word about it anywhere else.

    >>> one, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
    >>> mean_of_softmaxes([one, other]).exp()
    tensor([[0.3750, 0.6250]])
    """
    logs = torch.stack([part.log_softmax(-1) for part in logits])
    return logs[0] if len(logits) == 1 else torch.logsumexp(logs, 0) - log(len(logits))
