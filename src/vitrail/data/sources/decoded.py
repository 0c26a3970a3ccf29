"""Clips and sounds as arrays of one shape: what a model of a known input size sees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.media.recording import Recording
from vitrail.data.sample import Sample, TensorSpec
from vitrail.data.sources.arrays import byte_statistics, number_statistics
from vitrail.data.sources.base import Labels, Source
from vitrail.data.spec import InputSpec
from vitrail.errors import ImageError

MEASURED = 256
"""Most sounds that are read for the mean and standard deviation of spectrograms, spread evenly."""


class DecodedSource(Source):
    """The recordings of another source, decoded as an input specification says: frames in bytes, or spectrograms."""

    def __init__(self, source: Source, spec: InputSpec, measure: bool = False) -> None:
        self._source, self._spec, self._measure = source, spec, measure
        self.names, self.paths = source.names, source.paths
        self.modality = spec.modality
        video = spec.modality == "video"
        self.tensor_spec: TensorSpec = TensorSpec(
            (3 if video else 1, *spec.size), torch.uint8 if video else torch.float32
        )

    def files(self, rows: Sequence[int]) -> Sequence[Path]:
        return self._source.files(rows)

    def labels(self, column: str | None) -> Labels:
        return self._source.labels(column)

    def values(self, column: str) -> Sequence[Any]:
        return self._source.values(column)

    def fetch(self, row: int, *, annotations: bool = True) -> Callable[[], Sample]:
        read = self._source.fetch(row, annotations=annotations)

        def decode() -> Sample:
            sample = read()
            assert isinstance(sample.image, Recording)
            return sample._replace(image=sample.image.values(self._spec))

        return decode

    def statistics(self, rows: Sequence[int]) -> InputSpec:
        """Return the specification; with ``measure``, colors are normalized as images are, numbers as measured."""
        if not self._measure:
            return self._spec
        if self.modality == "video":
            measured = byte_statistics(3)
        else:
            found: list[Any] = []
            for place in range(min(len(rows), MEASURED)):
                try:
                    found.append(self.read(rows[place * len(rows) // min(len(rows), MEASURED)]).image)
                except ImageError:
                    continue
            if not found:
                self.read(rows[0])  # raises with the reason
            measured = number_statistics(torch.stack(found), torch.arange(len(found)))
        return replace(self._spec, mean=measured.mean, std=measured.std, scale=measured.scale)
