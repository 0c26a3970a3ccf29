"""Tensors as examples: sounds as spectrograms, videos, anything that has channels and two or three axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.normalize import Normalising
from vitrail.data.decoded import Form, Read
from vitrail.data.sources.labelled import LABEL, Labelled, numbered, whole
from vitrail.data.spec import MEAN, STD
from vitrail.errors import InvalidOption

AT_ONCE = 256
"""Samples that are measured at once."""


class Arrays:
    """Samples of one shape, in memory, with their classes. They are neither resized nor cut: a model is built for them.

    Args:
        values: (N, C, H, W) or (N, C, T, H, W), a tensor or a numpy array: bytes, which are scaled as pictures are, or
            floating point numbers, which are normalised by the mean and spread of each channel of the training data.
        labels: N class numbers or names, in a sequence or a tensor; for tasks a mapping of columns to such. None, or a
            negative number, is no class: where one is missing by any column that is learned, the sample is left out.
        classes: names of the classes, by column where labels are; by default the names that occur, in order of the
            alphabet, or the numbers.
        names: what to call each sample.

    Example:
        >>> sounds = Arrays(torch.randn(6, 1, 32, 48), ["hum", "hiss"] * 3)
        >>> sounds
        Arrays(6 × (1, 32, 48), float32, label: 2 classes)
    """

    def __init__(self, values: Any, labels: Any, classes: Any = None, names: Sequence[str] | None = None) -> None:
        self._values = _values(values)
        count = len(self._values)
        self.own = Form(tuple(self._values.shape[1:]), self._values.dtype)
        self.names: Sequence[str] = [f"number {row}" for row in range(count)] if names is None else list(names)
        if len(self.names) != count:
            raise InvalidOption(f"names: {len(self.names)} of them for {count} samples. Expected one for each.")
        columns = labels if isinstance(labels, Mapping) else {LABEL: labels}
        called = classes if isinstance(labels, Mapping) else {LABEL: classes}
        if not columns or not isinstance(called or {}, Mapping) or set(called or {}) - set(columns):
            raise InvalidOption(
                f"labels={type(labels).__name__}, classes={type(classes).__name__}: expected a sequence of one class "
                "for each sample, or a mapping of columns to such; and names of classes by the same columns."
            )
        self._labels = {
            str(name): _labelled(str(name), given, count, (called or {}).get(name)) for name, given in columns.items()
        }

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        kind = str(self.own.dtype).removeprefix("torch.")
        counts = {name: len(found.names or set(found.numbers) - {None}) for name, found in self._labels.items()}
        columns = [f"{name}: {number} classes" for name, number in counts.items()]
        return f"Arrays({len(self)} × {self.own.shape}, {kind}, {', '.join(columns)})"

    def labelled(self, column: str | None) -> Labelled:
        """Give the classes by a column; by default by the only one."""
        if column is None and len(self._labels) == 1:
            return next(iter(self._labels.values()))
        if column not in self._labels:
            asked = "no column of labels is named" if column is None else f"labels={column!r}: no such column"
            raise InvalidOption(
                f"{asked}, and these arrays have {', '.join(self._labels)}. Name one, or several tasks."
            )
        return self._labels[column]

    def fetch(self, row: int, side: int) -> Read:
        """Give what reads a sample, as it is."""
        return partial(self._values.__getitem__, row)

    def normalising(self, rows: Sequence[int]) -> Normalising:
        """Normalise bytes as colours are, and numbers by mean and spread of each channel in these rows."""
        channels = self.own.channels
        if self.own.dtype == torch.uint8:
            return bytes_like_pictures(channels)
        mean, spread = _measured(self._values, torch.tensor(list(rows)))
        wrong = (~(mean + spread).isfinite()).nonzero()[:, 0].tolist()
        if wrong:
            raise InvalidOption(f"values: channel {wrong[0]} has values that are not finite. Repair or leave them out.")
        constant = spread <= 1e-12 * mean.abs()
        return Normalising(tuple(mean.tolist()), tuple(torch.where(constant, 1.0, spread).tolist()))


def bytes_like_pictures(channels: int) -> Normalising:
    """Normalise bytes as pictures are: three channels as colours, others from −1 to 1."""
    if channels == len(MEAN):
        return Normalising(MEAN, STD, 255)
    return Normalising((0.5,) * channels, (0.5,) * channels, 255)


def _measured(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Give mean and spread (C,) of some samples, in float64, without a copy of them all."""
    axes = [axis for axis in range(values.dim()) if axis != 1]
    number = len(rows) * values[0, 0].numel()
    mean, square = torch.zeros(2, values.shape[1], dtype=torch.float64)
    for part in rows.split(AT_ONCE):
        mean += values[part].sum(axes, dtype=torch.float64) / number
    middle = mean.view(-1, *[1] * (len(axes) - 1))
    for part in rows.split(AT_ONCE):
        square += (values[part].double() - middle).square().sum(axes) / number
    return mean, square.sqrt()


def _values(given: Any) -> Tensor:
    if isinstance(given, np.ndarray) and given.dtype in (np.uint8, np.float16, np.float32, np.float64):
        with warnings.catch_warnings():  # nothing is written to an array that is for reading alone
            warnings.simplefilter("ignore", UserWarning)
            given = torch.from_numpy(np.ascontiguousarray(given))
    good = isinstance(given, Tensor) and (given.dtype == torch.uint8 or given.is_floating_point())
    if not good or given.dim() not in (4, 5) or not given.numel():
        shape, kind = tuple(getattr(given, "shape", ())), getattr(given, "dtype", type(given).__name__)
        raise InvalidOption(
            f"values: got {kind} of shape {shape}. Expected (N, C, H, W) or (N, C, T, H, W), one sample or more, of "
            "bytes (uint8) or floating point numbers."
        )
    values: Tensor = given.detach().cpu()
    return values


def _labelled(column: str, given: Any, count: int, names: Sequence[str] | None) -> Labelled:
    """Number the classes of a column."""
    if not isinstance(given, Iterable):
        raise InvalidOption(f"labels: {column} is {type(given).__name__}. Expected one class for each sample.")
    values = given.tolist() if isinstance(given, Tensor | np.ndarray) else list(given)
    if len(values) != count:
        raise InvalidOption(f"labels: {column} has {len(values)}, for {count} samples. Expected one class for each.")
    values = [one if isinstance(one, str) else whole(one, f"{column}, number {row}") for row, one in enumerate(values)]
    found = numbered(values)
    if names is None:
        return found
    known = tuple(map(str, names))
    if found.names is None:
        return Labelled(found.numbers, known)
    if len(set(known)) < len(known) or set(found.names) - set(known):
        missing = sorted(set(found.names) - set(known)) or ["a name that occurs twice"]
        raise InvalidOption(f"classes: {column} has {missing[0]!r}, which cannot be told among {len(known)} names.")
    places = [known.index(name) for name in found.names]
    return Labelled([None if number is None else places[number] for number in found.numbers], known)
