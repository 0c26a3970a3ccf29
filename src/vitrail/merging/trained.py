"""Parts of a merging whose parameters must be trained or loaded before they may run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UntrainedMethod


class Trained(nn.Module):
    """A learned method, a fitted restorer, or a network that foresees attention.

    Attributes:
        passes: number of times that it was trained, saved with the weights; 0 for one that was never trained.
    """

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self._is_trained = False

    @property
    def is_trained(self) -> bool:
        """Whether it was trained, or its weights come from a trained one."""
        if not self._is_trained:  # read from the device until it is true
            self._is_trained = bool(self.passes)
        return self._is_trained

    def untrained(self) -> str:
        """Return what to do where this was not trained, for the error."""
        raise NotImplementedError(f"{type(self).__name__} does not implement untrained()")

    def check_trained(self) -> None:
        """Raise ``UntrainedMethod`` if this was never trained."""
        if not self.is_trained:
            raise UntrainedMethod(self.untrained())

    def count_pass(self) -> None:
        """Count one more training."""
        self.passes += 1

    def forget_training(self) -> None:
        """Count from 0 again, for new parameters."""
        self.passes.zero_()
        self._is_trained = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_trained = False
