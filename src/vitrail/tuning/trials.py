"""Trials: run a model on fixed images under one setting after another, and compare with the unmerged model."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._timing import Clock, measure_rounds
from vitrail._wording import counted
from vitrail.adapters import Found
from vitrail.adapters.outputs import output_tensor, task_sizes
from vitrail.errors import SaturatedWarning, UnsupportedInput
from vitrail.surgery import Merging, merge
from vitrail.surgery.copies import copy_unmerged
from vitrail.surgery.recording import check_finite, evaluating, taking, to_model
from vitrail.tuning.quality import Compare, Quality, divergence, of_tasks

Counts = tuple[int, ...]
Setting = tuple[Any, Counts]
"""A method, and merges per layer."""


class Trials:
    """Comparisons of merged models with the unmerged one on the same images.

    Attributes:
        images: preprocessed images, in batches, where they came from.
        labels: labels (n,) of all images, where there are any.
        count: number of images.
        dense: tokens after the last block are compared too.
        tasks: number of classes of each task, whose logits are side by side.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        images: Sequence[Tensor],
        labels: Tensor | None,
        dense: bool,
        **options: Any,
    ) -> None:
        self.model = model
        self.found = found
        self.images = list(images)
        self.labels = labels
        self.count = sum(map(len, self.images))
        self.dense = dense
        self.options = options
        self.merging: Merging | None = None
        self.method: Any = None
        self.reference: list[Tensor] = []
        self.tasks: list[int] = []

    @contextmanager
    def open(self, on_batch: Callable[[int], object], fewest: int, until: float, seed: int) -> Iterator[None]:
        """Run the unmerged model, and leave the model unmerged and in its own mode at the end.

        Batches that it has not seen by the moment ``until`` are left out, unless there are ``fewest`` images or less
        without them; which ones are seen first is random.
        """
        with evaluating(self.model), torch.inference_mode():
            try:
                self._see(on_batch, fewest, until, seed)
                yield
            finally:
                self._remove()

    def _see(self, on_batch: Callable[[int], object], fewest: int, until: float, seed: int) -> None:
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed)).tolist()
        seen: dict[int, Tensor] = {}
        for place in order:
            if sum(map(len, seen.values())) >= fewest and time.monotonic() >= until:
                break
            seen[place] = self._run(self.images[place])
            check_finite(seen[place], "outputs of the unmerged model")
            on_batch(len(seen))
        places = sorted(seen)
        self.reference = [seen[place] for place in places]
        if self.labels is not None:
            labels = self.labels.split([len(batch) for batch in self.images])
            self.labels = torch.cat([labels[place] for place in places])
        self.images = [self.images[place] for place in places]
        self.count = sum(map(len, self.images))

    def apply(self, method: Any, r: Sequence[int]) -> Merging:
        """Merge the model with a setting; return the handle."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaturatedWarning)
            if self.merging is None or self.method is not method:
                self._remove()
                self.merging, self.method = merge(self.model, list(r), method=method, **self.options), method
            elif self.merging.r != list(r):
                self.merging.r = list(r)
            if self.merging.r != list(r):  # more than there are to merge
                self.merging.r = self.merging.r
        return self.merging

    def cap(self, method: Any, r: Sequence[int]) -> Counts:
        """Return a schedule as it is possible."""
        return tuple(self.apply(method, r).r)

    def flops(self, method: Any, r: Sequence[int]) -> int:
        """Return the multiply-adds of one image under a setting."""
        return self.apply(method, r).flops(self._size)

    def compare(self, quality: Quality, method: Any, r: Sequence[int], images: Tensor) -> Tensor:
        """Compute a quality for each of these images (indices, in rising order)."""
        self.apply(method, r)
        return self._compared(quality, quality.compare, images)

    def distance(self, quality: Quality, method: Any, r: Sequence[int], images: Tensor) -> float:
        """Compute the mean smooth distance from the unmerged model on these images."""
        self.apply(method, r)
        return float(self._compared(quality, divergence(quality), images).mean())

    def times(self, settings: Sequence[Setting | None], batch: Tensor, seconds: float) -> list[list[float]]:
        """Time settings on one batch, interleaved; None is the unmerged model. Return the seconds of each round.

        Each runs on a copy of the model's modules that shares its weights, so that no time goes into changing it.
        """
        batch = to_model(self.model, batch)
        self._remove()
        models = []
        for setting in settings:
            models.append(copy_unmerged(self.model))
            if setting is not None:
                method, counts = setting
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SaturatedWarning)
                    merge(models[-1], list(counts), method=copy.deepcopy(method), **self.options)
        steps = {index: partial(_call, model, batch) for index, model in enumerate(models)}
        rounds, _ = measure_rounds(steps, Clock(batch.device), seconds)
        return [rounds[index] for index in range(len(steps))]

    @property
    def _size(self) -> tuple[int, ...]:
        return tuple(self.found.adapter.channels_first(self.found.trunk, self.images[0]).shape[2:])

    def _compared(self, quality: Quality, compare: Compare, images: Tensor) -> Tensor:
        if quality.logits and len(self.tasks) > 1:
            compare = of_tasks(compare, self.tasks, share=quality.share)
        found, start = [], 0
        for batch, reference in zip(self.images, self.reference, strict=True):
            rows = images[(images >= start) & (images < start + len(batch))] - start
            if len(rows):
                output = self._run(batch[rows])
                labels = None if self.labels is None else self.labels[start + rows]
                found.append(compare(output, reference[rows], labels).cpu())
            start += len(batch)
        return torch.cat(found)

    def _run(self, batch: Tensor) -> Tensor:
        """Return the outputs, or the tokens after the last block, on the CPU."""
        kept: list[Tensor] = []
        hook = None
        if self.dense:
            block = self.found.blocks[-1]
            hook = block.register_forward_hook(
                lambda _, __, output: kept.append(output[0] if isinstance(output, tuple) else output)
            )
        try:
            with taking(self.found, batch):
                returned = self.model(to_model(self.model, batch))
                output, self.tasks = output_tensor(returned), task_sizes(self.model, returned)
        finally:
            if hook is not None:
                hook.remove()
        tokens = kept[-1] if kept else output
        if tokens.dim() < 2 or len(tokens) != len(batch):
            raise UnsupportedInput(
                f"tune compares one output per image, (images, ...); this model returned {tuple(tokens.shape)} for "
                f"{counted(len(batch), 'image')}"
            )
        return tokens.float().cpu()

    def _remove(self) -> None:
        if self.merging is not None:
            self.merging.remove()
            self.merging = None


def _call(model: nn.Module, batch: Tensor, _: int) -> object:
    return model(batch)
