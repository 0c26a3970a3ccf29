"""Everything that a training loop works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail._distributed import Crew
from vitrail.data.augment.arrays import ArrayAugment
from vitrail.data.augment.images import Augment
from vitrail.data.augment.mix import Mix
from vitrail.data.augment.views import Views
from vitrail.data.loading.loader import Loader
from vitrail.surgery import Merging
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config.config import Config
from vitrail.training.log import Log, Tell
from vitrail.training.model import Built
from vitrail.training.objective.teacher import Teacher
from vitrail.training.optim.optimizer import Ema


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
    feed: Loader
    data: dict[str, Any]
    held: Loader | None
    augment: Augment | Views | ArrayAugment
    settled: Augment | ArrayAugment
    mixing: Mix
    teacher: Teacher | None
    merging: Merging | None
    r: tuple[int, ...]
    checkpoints: Checkpoints
    log: Log
    tell: Tell
