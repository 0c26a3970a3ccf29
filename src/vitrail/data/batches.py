"""Batches of whatever a user passes as images: any dataset, a tensor, or batches of their own.

Every sample has an index, the same on every rank and in every pass, so that results of several ranks can be put in
order and single samples can be read again. Imported by ``import vitrail``, and so without Pillow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from vitrail._checks import check_int
from vitrail.data.media.modality import MODALITIES
from vitrail.data.sample import Batch
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, UnsupportedInput

BATCH_SIZE = 8
"""Default batch size for datasets."""


@dataclass
class Batches:
    """Samples to run a model on, in batches.

    Attributes:
        data, kind: a dataset, a tensor of preprocessed images, or an iterable of batches of such; and which of these,
            as reports name it.
        labels: labels of a tensor's images.
        limit: most samples to yield.
        only: indices of the samples to yield, in rising order; None for all.
        with_labels, axes: as for :func:`open_batches`.
        skipped: samples that could not be read in the last pass, each with the reason.
    """

    data: Any
    kind: Literal["collection", "tensor", "batches"]
    labels: Tensor | None = None
    limit: int | None = None
    only: tuple[int, ...] | None = None
    with_labels: bool = True
    axes: str = "CHW"
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int | None:
        """Number of samples, readable or not; None where it is not known before they are read."""
        sized: Any = getattr(self.data, "dataset", None) if self.kind == "batches" else self.data
        total = len(sized) if hasattr(sized, "__len__") else None
        return self.limit if total is None else min(total, self.limit or total)

    @property
    def class_names(self) -> Any:
        """Names of the classes, a tuple, if the data has them."""
        return self.data.class_names if self.kind == "collection" else None

    @property
    def runs_once(self) -> bool:
        """Whether the data is an iterator, which is empty after one pass."""
        return isinstance(self.data, Iterator)

    def repeatable(self) -> Batches:
        """Return the same batches for several passes; those of an iterator are kept in memory."""
        return replace(self, data=list(self.data)) if isinstance(self.data, Iterator) else self

    def select(self, indices: Iterable[int]) -> Batches:
        """Return the samples with these indices alone; they keep their indices, and of files no others are read."""
        return replace(self, only=tuple(sorted(indices)), skipped=[])

    def batches(
        self, spec: InputSpec, batch_size: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of one rank: datasets preprocessed by a specification, tensors as they are.

        Batches of the user's are iterated by every rank, which takes every ``world_size``-th of them. The others have
        ``batch_size`` samples; by default 8, or a tensor as a whole.
        """
        if batch_size is not None:
            check_int("batch_size", batch_size)
        if self.only == ():
            return
        if self.kind == "collection":
            indices = (range(len(self.data)) if self.only is None else self.only)[: self.limit]
            if rank < len(indices):
                self.skipped = []
                given = {"indices": indices, "rank": rank, "world_size": world_size}
                size = batch_size or BATCH_SIZE
                yield from self.data.batches(spec, size, on_skip=lambda *one: self.skipped.append(one), **given)
        elif self.kind == "tensor":
            yield from self._of_tensor(batch_size or len(self.data), rank, world_size)
        else:
            yield from self._of_batches(rank, world_size)

    def _of_tensor(self, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        every = torch.arange(self.total or 0) if self.only is None else torch.tensor(self.only, dtype=torch.long)
        for places in every[rank::world_size].split(batch_size):
            if len(places):
                indices = tuple(places.tolist())
                labels = None if self.labels is None else self.labels[places]
                contiguous = indices[-1] - indices[0] == len(indices) - 1  # then a view will do
                where = slice(indices[0], indices[-1] + 1) if contiguous else places.to(self.data.device)
                yield Batch(self.data[where], indices, _numbered(indices), labels)

    def _of_batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        end = float("inf") if self.limit is None else self.limit
        end = end if self.only is None else min(end, max(self.only) + 1)
        start = 0
        for number, batch in enumerate(self.data):
            images, labels = batch_parts(batch, self.with_labels, self.axes)
            every = range(start, start + len(images))
            indices = tuple(index for index in every if index < end and (self.only is None or index in self.only))
            if indices and number % world_size == rank:
                if len(indices) < len(every):
                    rows = [index - start for index in indices]
                    images, labels = images[rows], None if labels is None else labels[rows]
                yield Batch(images, indices, _numbered(indices), labels)
            start = every.stop
            if start >= end:
                return


def open_batches(
    data: Any, *, limit: int | None = None, labels: Any = None, with_labels: bool = True, axes: str = "CHW"
) -> Batches:
    """Open whatever a user passes as images.

    Args:
        data: anything that :func:`~vitrail.data.open_dataset` opens; a numpy image (H, W, 3), several of these in bytes
            or from 0 to 1; preprocessed images (B, C, H, W), a tensor or a floating point array; or batches of such,
            each alone or first in a tuple.
        limit: most samples to take.
        labels: label column of a dataset; for tensors and arrays, one whole number for each image.
        with_labels: whether to read labels; those of batches are the second part of a tuple.
        axes: order of the axes of one input in a tensor: ``"CHW"``, ``"CTHW"`` for clips, or that of an `InputSpec`.
    """
    if limit is not None:
        check_int("limit", limit)
    data = _from_numpy(data, axes)
    if isinstance(data, Tensor):
        if data.dim() != 1 + len(axes) or not len(data):
            raise UnsupportedInput(f"expected {_shape(axes)}, one or more; got a tensor of {tuple(data.shape)}")
        return Batches(data, "tensor", _as_labels(labels, len(data)), limit)
    from vitrail.data.dataset import Dataset, open_dataset

    if isinstance(data, Dataset):
        return Batches(data, "collection", limit=limit)
    if _is_source(data):
        columns: Any = (() if labels is None else labels) if with_labels else None
        if labels is not None and _is_image(data[0]) and not isinstance(labels, str):
            numbers: Any = _as_labels(labels, len(data))
            columns, data = (), [*zip(data, numbers.tolist(), strict=True)]
        recorded = (name for name, one in MODALITIES.items() if one.sampling and {*one.axes} - {"C"} <= {*axes})
        dataset = open_dataset(data, limit=limit, labels=columns, modality=next(recorded, None))
        return Batches(dataset, "collection", limit=limit)
    if isinstance(data, Iterable):
        if labels is not None:
            raise InvalidOption("labels of batches come with them, as (images, labels); leave labels out")
        return Batches(data, "batches", limit=limit, with_labels=with_labels, axes=axes)
    raise UnsupportedInput(
        "expected images: files, a folder, a dataset, a tensor (B, C, H, W), batches of such, or arrays (H, W, 3); got "
        f"{type(data).__name__}"
    )


def batch_parts(batch: Any, with_labels: bool = True, axes: str = "CHW") -> tuple[Tensor, Tensor | None]:
    """Return images and labels of a batch, which is a tensor, or a tuple of both."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    images = _from_numpy(parts[0], axes) if parts else None
    if not isinstance(images, Tensor) or images.dim() != 1 + len(axes):
        what = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise UnsupportedInput(f"a batch is {_shape(axes)}, or (images, labels); got {what}")
    return images, _as_labels(parts[1], len(images)) if with_labels and len(parts) > 1 else None


def _is_source(data: Any) -> bool:
    """Return whether data is what :func:`open_dataset` opens, and not batches."""
    from vitrail.data.sources import Source, are_paths

    if are_paths(data) or isinstance(data, Source | np.ndarray):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and all(map(_is_image, data))
    map_style = isinstance(data, TorchDataset) and not isinstance(data, IterableDataset)
    return map_style or (hasattr(data, "features") and hasattr(data, "cast_column"))


def _is_image(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim < 4)


def _from_numpy(data: Any, axes: str) -> Any:
    """Return a floating point array of preprocessed inputs as a tensor, and images ([B,] H, W[, C]) as a list."""
    if not isinstance(data, np.ndarray):
        return data
    floating = np.issubdtype(data.dtype, np.floating)
    if floating and axes != "CHW" and data.ndim == 1 + len(axes):
        return torch.tensor(data, dtype=torch.float32)
    if data.ndim < 4 or (data.ndim == 4 and data.shape[-1] in (1, 3) and data.shape[1] not in (1, 3)):
        return [data] if data.ndim < 4 else list(data)
    return torch.tensor(data, dtype=torch.float32) if floating else data


def _shape(axes: str) -> str:
    noun = "images" if "T" not in axes else "videos" if "H" in axes else "spectrograms"
    return f"{noun} (B, {', '.join(axes)})"


def _as_labels(labels: Any, count: int) -> Tensor | None:
    if labels is None:
        return None
    try:
        found = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    if found.dim() != 1 or len(found) != count or found.is_floating_point() or found.is_complex():
        raise UnsupportedInput(f"labels: expected one whole number for each of {count} images; got {labels!r:.200}")
    return found.long()


def _numbered(indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"image {index}" for index in indices)
