"""Everything that a training loop works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail.processes import Crew
from vitrail.surgery import Merging
from vitrail.training.augment import Augment
from vitrail.training.building import Built
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import Config
from vitrail.training.feeds import Feed
from vitrail.training.log import Log, Tell
from vitrail.training.mixing import Mix
from vitrail.training.optim import Ema
from vitrail.training.shifting import ArrayAugment
from vitrail.training.teacher import Teacher
from vitrail.training.views import Views


@dataclass(frozen=True)
class Parts:
    """Everything that a loop works with.

    Attributes:
        learner: model and objective; what checkpoints hold.
        wrapped: the same as it is called, maybe through DDP.
        feed: the pictures to learn from.
        data: their fingerprint.
        held: the pictures to evaluate on.
        settled: takes the place of ``augment`` in the last epochs, where those are plain.
        merging: the handle of the model's merging.
        r: merges per layer at the end of their rise.
    """

    config: Config
    crew: Crew
    built: Built
    classes: dict[str, tuple[str, ...]]
    learner: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    feed: Feed
    data: dict[str, Any]
    held: Feed | None
    augment: Augment | Views | ArrayAugment
    settled: Augment | ArrayAugment
    mixing: Mix
    teacher: Teacher | None
    merging: Merging | None
    r: tuple[int, ...]
    checkpoints: Checkpoints
    log: Log
    tell: Tell
