"""Merging inside the ``Trainer`` of transformers: r rises over the training, and logs say how many tokens are left."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import vitrail
from vitrail._checks import check_int, check_share
from vitrail.errors import NotApplied


class MergeCallback(TrainerCallback):
    """Merge the tokens of a Trainer's model, more and more, up to the full setting.

    The model is merged when training begins, and stays merged. In the first part of the training, r rises in equal
    stages; from then on it is the full one. Evaluations run at the present setting. The logs have ``tokens``, the
    number of tokens that leave the last block, and ``gflops`` of an input. Weights and checkpoints are those of the
    unmerged model.

    >>> Trainer(model, arguments, callbacks=[MergeCallback(r=8, over=0.5)], ...)  # doctest: +SKIP

    Args:
        over: part of the training in which r rises, from 0 to 1; 0 merges fully from the first step.
        stages: number of settings before the full one. Each one is a new shape of the model, which ``torch.compile``
            compiles again.
        options: for `vitrail.merge`, such as ``r=8`` or ``keep=0.5``.
    """

    def __init__(self, *, over: float = 0.0, stages: int = 4, **options: Any) -> None:
        check_share("over", over)
        check_int("stages", stages)
        self.over, self.stages, self.options = over, stages, options
        self.merging: vitrail.Merging | None = None
        self._full: list[int] = []

    def share_at(self, step: int, steps: int) -> float:
        """Return the share of the full r before a step, counted from 0, of all ``steps``."""
        ramp = self.over * steps
        return (int(step / ramp * self.stages) + 1) / (self.stages + 1) if step < ramp else 1.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Merge the model, in place of a merging that it may have."""
        with suppress(NotApplied):
            vitrail.Merging.of(model).remove()
        self.merging = vitrail.merge(model, **self.options)
        self._full = self.merging.r
        self._set(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set r for the step that begins."""
        self._set(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the full r."""
        if self.merging is not None:
            self.merging.r = self._full

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the number of tokens and the FLOPs to the logs."""
        if self.merging is None or not self.merging.is_active:
            return
        figures = {"tokens": self.merging.tokens_per_layer()[-1], "gflops": self.merging.flops() / 1e9}
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry.update(figures)

    def _set(self, state: TrainerState) -> None:
        assert self.merging is not None
        share = self.share_at(state.global_step, state.max_steps)
        wanted = [round(share * count) for count in self._full]
        if self.merging.r != wanted:
            self.merging.r = wanted
