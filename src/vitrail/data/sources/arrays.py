"""Tensors and numpy arrays: spectrograms, videos, anything with channels and two or three more axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sample import Sample, TensorSpec
from vitrail.data.sources.base import LABEL, Labels, Source, class_number, number_classes
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption

CHUNK = 256
"""Samples measured at a time."""


class Arrays(Source):
    """Samples of one shape, in memory, with their labels. They are never resized: a model is built for their shape.

    Args:
        values: (N, C, H, W) or (N, C, T, H, W), a tensor or a numpy array: bytes, scaled as images are, or floating
            point numbers, normalized by the statistics of each channel of the training data.
        labels: N class numbers or names, in a sequence or a tensor; for several tasks a mapping of columns to such.
            None or a negative number: the sample has no label, and is left out of training. Floating point numbers are
            the values of a regression, lists the classes of multi-label samples; name their column, as in
            ``{"age": ages}`` with ``labels="age"``.
        classes: names of the classes, by column where labels are; by default the names that occur, sorted, or the
            numbers.
        names: name of each sample.

    Example:
        >>> Arrays(torch.randn(6, 1, 32, 48), ["hum", "hiss"] * 3)
        Arrays(6 × (1, 32, 48), float32, label: 2 classes)
    """

    modality = "array"

    def __init__(
        self, values: Any, labels: Any = None, classes: Any = None, names: Sequence[str] | None = None
    ) -> None:
        self._values = _checked(values)
        count = len(self._values)
        self.tensor_spec: TensorSpec = TensorSpec(tuple(self._values.shape[1:]), self._values.dtype)
        self.names = [f"number {row}" for row in range(count)] if names is None else list(names)
        if len(self.names) != count:
            raise InvalidOption(f"names: {len(self.names)} for {count} samples; expected one for each")
        given = labels if isinstance(labels, Mapping) else {} if labels is None else {LABEL: labels}
        named = classes if isinstance(labels, Mapping) else {LABEL: classes} if given else classes
        if (isinstance(labels, Mapping) and not labels) or not isinstance(named or {}, Mapping):
            raise InvalidOption("labels: expected one class for each sample, or a mapping of columns to such")
        if set(named or {}) - set(given):
            raise InvalidOption("classes: expected names by the same columns as labels")
        self._labels: dict[str, Labels] = {}
        self._raw: dict[str, list[Any]] = {}
        for name, column in given.items():
            listed = _listed(str(name), column, count)
            if any(isinstance(one, float | list | tuple) for one in listed):
                self._raw[str(name)] = listed
            else:
                self._labels[str(name)] = _column(str(name), listed, (named or {}).get(name))

    def __repr__(self) -> str:
        dtype = str(self.tensor_spec.dtype).removeprefix("torch.")
        counts = {name: len(found.names or set(found.numbers) - {None}) for name, found in self._labels.items()}
        columns = [f"{name}: {number} classes" for name, number in counts.items()]
        return f"Arrays({', '.join([f'{len(self)} × {self.tensor_spec.shape}', dtype, *columns])})"

    def labels(self, column: str | None) -> Labels:
        """Return a label column; None for the only one."""
        if column in self._raw or (column is None and len(self._raw) == 1 and not self._labels):
            (name, *_) = self._raw if column is None else (column,)
            raise InvalidOption(f"{name} holds no classes; name it with labels={name!r} to learn its values")
        if column is None and len(self._labels) <= 1:
            return next(iter(self._labels.values()), Labels([None] * len(self)))
        if column not in self._labels:
            problem = "no label column is chosen" if column is None else f"labels={column!r}: no such column"
            raise InvalidOption(f"{problem}; these arrays have {', '.join(self._labels) or 'none'}")
        return self._labels[column]

    def values(self, column: str) -> Sequence[Any]:
        if column in self._raw:
            return self._raw[column]
        found = self.labels(column)
        names = found.names
        return [number if names is None or number is None else names[number] for number in found.numbers]

    def read(self, row: int) -> Sample:
        return Sample(self._values[row], self.names[row])

    def statistics(self, rows: Sequence[int]) -> InputSpec:
        """Return how to normalize these rows: bytes as colors, numbers by mean and standard deviation per channel."""
        if self.tensor_spec.dtype == torch.uint8:
            return byte_statistics(self.tensor_spec.channels)
        return number_statistics(self._values, torch.tensor(list(rows)))


def byte_statistics(channels: int) -> InputSpec:
    """Return how to normalize bytes: three channels as ImageNet's colors, others to −1 … 1."""
    half = (0.5,) * channels
    return InputSpec.of_arrays(*((MEAN, STD) if channels == len(MEAN) else (half, half)), 255)


def number_statistics(values: Tensor, rows: Tensor) -> InputSpec:
    """Return how to normalize numbers (N, C, ...): by mean and standard deviation of each channel of some rows."""
    mean, std = _moments(values, rows)
    wrong = (~(mean + std).isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise InvalidOption(f"values: channel {wrong[0]} has values that are not finite; repair or remove them")
    constant = std <= 1e-12 * mean.abs()
    return InputSpec.of_arrays(mean.tolist(), torch.where(constant, 1.0, std).tolist())


def _moments(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation (C,) of some samples in float64, a chunk at a time."""
    axes = [axis for axis in range(values.dim()) if axis != 1]
    number = len(rows) * values[0, 0].numel()
    mean, square = torch.zeros(2, values.shape[1], dtype=torch.float64)
    for part in rows.split(CHUNK):
        mean += values[part].sum(axes, dtype=torch.float64) / number
    center = mean.view(-1, *[1] * (len(axes) - 1))
    for part in rows.split(CHUNK):
        square += (values[part].double() - center).square().sum(axes) / number
    return mean, square.sqrt()


def _checked(given: Any) -> Tensor:
    if isinstance(given, np.ndarray) and given.dtype in (np.uint8, np.float16, np.float32, np.float64):
        with warnings.catch_warnings():  # torch warns about read-only arrays; nothing is written here
            warnings.simplefilter("ignore", UserWarning)
            given = torch.from_numpy(np.ascontiguousarray(given))
    good = isinstance(given, Tensor) and (given.dtype == torch.uint8 or given.is_floating_point())
    if not good or given.dim() not in (4, 5) or not given.numel():
        shape, kind = tuple(getattr(given, "shape", ())), getattr(given, "dtype", type(given).__name__)
        raise InvalidOption(
            f"values: got {kind} of shape {shape}; expected (N, C, H, W) or (N, C, T, H, W), one sample or more, in "
            "uint8 or floating point"
        )
    values: Tensor = given.detach().cpu()
    return values


def _listed(column: str, given: Any, count: int) -> list[Any]:
    """Return a label column as a list."""
    if not isinstance(given, Iterable):
        raise InvalidOption(f"labels: {column} is {type(given).__name__}; expected one class for each sample")
    values = given.tolist() if isinstance(given, Tensor | np.ndarray) else list(given)
    if len(values) != count:
        raise InvalidOption(f"labels: {column} has {len(values)}, for {count} samples; expected one class for each")
    return values


def _column(column: str, values: list[Any], names: Sequence[str] | None) -> Labels:
    """Number the classes of a label column."""
    values = [
        one if isinstance(one, str) else class_number(one, f"{column}, number {row}") for row, one in enumerate(values)
    ]
    found = number_classes(values)
    if names is None:
        return found
    known = tuple(map(str, names))
    if found.names is None:
        return Labels(found.numbers, known)
    if len(set(known)) < len(known) or set(found.names) - set(known):
        missing = sorted(set(found.names) - set(known)) or ["a name that occurs twice"]
        raise InvalidOption(f"classes: {column} has {missing[0]!r}, which is not one of the {len(known)} names")
    places = [known.index(name) for name in found.names]
    return Labels([None if number is None else places[number] for number in found.numbers], known)
