"""Base classes of methods whose number of tokens depends on the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.method import Method


class DynamicMethod(Method):
    """A method whose number of tokens depends on the image.

    Args:
        bucket: lengths are padded to a multiple of this; None: 16 on CUDA devices, 1 elsewhere.
    """

    static = False

    def __init__(self, bucket: int | None = None) -> None:
        super().__init__()
        if bucket is not None and not is_int(bucket, 1):
            raise InvalidOption(f"bucket is a whole number of 1 or more, or None; got {bucket!r}")
        self.bucket = bucket

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.bucket is None else {"bucket": self.bucket}


class Calibrated(DynamicMethod):
    """A dynamic method whose settings ``Merging.calibrate`` measures on images, for a mean budget.

    Inside ``measuring()`` a subclass appends what it measures to ``self.measured[layer]`` for each batch, and removes
    the planned number of tokens on average.
    """

    calibrated: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a calibration sets."""
    step: ClassVar[float] = 0.01
    """A small change of the settings, for :meth:`shift`."""
    measured: dict[int, list[Tensor]] | None = None

    @contextmanager
    def measuring(self, depth: int) -> Iterator[None]:
        """Measure during the passes inside the ``with`` block, and use the settings found afterwards."""
        measured = self.measured = {layer: [] for layer in range(depth)}
        try:
            yield
        finally:
            self.measured = None
        self.settle([measured[layer] for layer in range(depth)])

    def settle(self, measured: Sequence[Sequence[Tensor]]) -> None:
        """Choose the settings from the measurements of each layer; layers without any were planned to merge nothing."""
        raise NotImplementedError

    def shift(self, by: float) -> None:
        """Merge more (``by`` above 0) or less, in all layers."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes that a calibration sets. Assign to set them."""
        return {name: getattr(self, name) for name in self.calibrated}

    @settings.setter
    def settings(self, values: Mapping[str, Any]) -> None:
        for name in self.calibrated:
            setattr(self, name, values[name])


def by_first(first: Tensor, present: Tensor | None = None) -> Assignment:
    """Return the groups of tokens (B, N) that name the same first member, in the order of these.

    ``present`` is False for padding, which comes last.
    """
    leads = first == torch.arange(first.shape[1], device=first.device)
    if present is not None:
        leads &= present
    place, kept = leads.long().cumsum(1) - 1, leads.sum(1, keepdim=True)
    length = int(kept.max())
    target = place.gather(1, first)
    return Assignment(target if present is None else torch.where(present, target, kept.clamp(max=length - 1)), length)
