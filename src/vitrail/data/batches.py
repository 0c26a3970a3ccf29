"""Whatever a user calls pictures, as a stream of batches: files, a collection, a tensor, or batches of their own.

Every picture has a number, the same in every process and at every walk, so that what several processes saw can be put
in order, and single pictures can be looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.spec import Batch, Preprocessing
from vitrail.errors import InvalidOption, UnsupportedInput

AT_ONCE = 8
"""Pictures in a batch of files, where nobody says how many."""


@dataclass
class Feed:
    """Pictures to run a model on.

    Attributes:
        data: a collection, a tensor, or an iterable of batches.
        kind: the same in words.
        labels: labels of a tensor's pictures.
        limit: most pictures to look at.
        only: numbers of the pictures to give, in their order; None for all.
        with_labels: whether labels that come with batches are looked at.
        frames: whether they are videos (B, C, T, H, W).
        skipped: pictures that could not be read at the last walk, and why.
    """

    data: Any
    kind: str
    labels: Tensor | None = None
    limit: int | None = None
    only: tuple[int, ...] | None = None
    with_labels: bool = True
    frames: bool = False
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int | None:
        """Number of pictures, readable or not, where it is known before they are read."""
        if self.kind == "batches":
            known: Any = getattr(self.data, "dataset", None)
            total = len(known) if hasattr(known, "__len__") else None
        else:
            total = len(self.data)
        return self.limit if total is None else min(total, self.limit or total)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the classes, where there are any."""
        names = getattr(self.data, "label_names", None) if self.kind == "collection" else None
        return tuple(map(str, names)) if names else None

    @property
    def runs_once(self) -> bool:
        """Whether the pictures are gone after one walk: an iterator, such as a generator."""
        return self.kind == "batches" and isinstance(self.data, Iterator)

    def lasting(self) -> Feed:
        """Give the same pictures for several walks: batches that run once are held in memory, all others are not."""
        return replace(self, data=list(self.data)) if self.runs_once else self

    def some(self, indices: Iterable[int]) -> Feed:
        """Give the pictures with these numbers alone; of files no others are read."""
        return replace(self, only=tuple(sorted(indices)), skipped=[])

    def batches(
        self, preprocessing: Preprocessing, batch_size: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Give the batches of one of ``world`` processes.

        Of batches that the user makes, each process is given all and looks at every ``world``-th.

        Args:
            preprocessing: how files are prepared; prepared pictures stay as they are.
            batch_size: pictures in a batch, unless they come in batches; by default 8 files, or a tensor as a whole.
            rank: number of this process.
            world: how many there are.
        """
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
        ):
            raise InvalidOption(f"batch_size is 1 or more; got {batch_size!r}")
        if self.only == ():
            return
        if self.kind == "collection":
            yield from self._from_collection(preprocessing, batch_size or AT_ONCE, rank, world)
        elif self.kind == "tensor":
            yield from self._from_tensor(batch_size or len(self.data), rank, world)
        else:
            yield from self._from_batches(rank, world)

    def _from_collection(self, preprocessing: Preprocessing, batch_size: int, rank: int, world: int) -> Iterator[Batch]:
        part = self.data if self.only is None else self.data.some(self.only)
        part = part.part(rank, world) if world > 1 else part
        limit = None if self.limit is None else max(0, -(-(self.limit - rank) // world))
        if limit == 0:
            return
        try:
            yield from part.batches(preprocessing, batch_size, limit=limit)
        finally:
            self.skipped = [(str(name), str(reason)) for name, reason in part.skipped]

    def _from_tensor(self, batch_size: int, rank: int, world: int) -> Iterator[Batch]:
        every = torch.arange(self.total or 0) if self.only is None else torch.tensor(self.only, dtype=torch.long)
        for places in every[rank::world].split(batch_size):
            if len(places):
                indices = tuple(places.tolist())
                labels = None if self.labels is None else self.labels[places]
                together = indices[-1] - indices[0] == len(indices) - 1  # then nothing needs to be copied
                where = slice(indices[0], indices[-1] + 1) if together else places.to(self.data.device)
                yield Batch(self.data[where], indices, _numbered(indices), labels)

    def _from_batches(self, rank: int, world: int) -> Iterator[Batch]:
        start = 0
        for number, batch in enumerate(self.data):
            images, labels = batch_parts(batch, self.with_labels, self.frames)
            if self.limit is not None:
                images = images[: self.limit - start]
                labels = None if labels is None else labels[: self.limit - start]
            indices = tuple(range(start, start + len(images)))
            start += len(images)
            if number % world == rank:
                piece = self._wanted(Batch(images, indices, _numbered(indices), labels))
                if piece.indices:
                    yield piece
            if start >= self._end():
                return

    def _wanted(self, piece: Batch) -> Batch:
        """Leave out what was not asked for."""
        if self.only is None:
            return piece
        rows = [row for row, index in enumerate(piece.indices) if index in self.only]
        indices = tuple(piece.indices[row] for row in rows)
        labels = None if piece.labels is None else piece.labels[rows]
        return Batch(piece.images[rows], indices, _numbered(indices), labels)

    def _end(self) -> float:
        """Give the number of pictures after which nothing more is wanted."""
        if self.only is not None:
            return max(self.only, default=-1) + 1
        return float("inf") if self.limit is None else self.limit


def open_feed(
    data: Any, *, limit: int | None = None, labels: Any = None, with_labels: bool = True, frames: bool = False
) -> Feed:
    """Take whatever a user calls pictures.

    Args:
        data: a picture file, a folder, several of these or a parquet file; a collection of them; prepared pictures
            (B, C, H, W); or batches of such, each a tensor or a tuple that begins with one.
        limit: most pictures to take.
        labels: for files, what :func:`~vitrail.data.collection.open_collection` takes; for a tensor, one whole
            number for each picture.
        with_labels: whether batches that are tuples have labels in the second place; otherwise the first place counts.
        frames: whether tensors are videos (B, C, T, H, W).
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidOption(f"limit is the most pictures to look at, 1 or more; got {limit!r}")
    if isinstance(data, str | os.PathLike) or _are_paths(data):
        from vitrail.data.collection import open_collection

        return Feed(open_collection(data, limit=limit, labels=labels), "collection", limit=limit)
    if all(hasattr(data, name) for name in ("batches", "part", "some", "__len__")):
        return Feed(data, "collection", limit=limit)
    if isinstance(data, Tensor):
        if data.dim() != 4 + frames or not len(data):
            raise UnsupportedInput(f"{_shape(frames)}, one or more; got a tensor of {tuple(data.shape)}")
        return Feed(data, "tensor", _as_labels(labels, len(data)), limit)
    if isinstance(data, Iterable):
        if labels is not None:
            raise InvalidOption("labels of batches come with them, as (pictures, labels); got both")
        return Feed(data, "batches", limit=limit, with_labels=with_labels, frames=frames)
    raise UnsupportedInput(
        "pictures are files, a folder, a collection, a tensor (B, C, H, W) or batches of such tensors; got "
        f"{type(data).__name__}"
    )


def batch_parts(batch: Any, with_labels: bool = True, frames: bool = False) -> tuple[Tensor, Tensor | None]:
    """Take a batch apart: pictures, or pictures and one whole number for each."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    images = parts[0] if parts else None
    if not isinstance(images, Tensor) or images.dim() != 4 + frames:
        what = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise UnsupportedInput(f"{_shape(frames)}, and a batch is such a tensor, or (pictures, labels); got {what}")
    return images, _as_labels(parts[1], len(images)) if with_labels and len(parts) > 1 else None


def _shape(frames: bool) -> str:
    return "videos are (B, C, T, H, W) for this model" if frames else "pictures are (B, C, H, W)"


def _as_labels(labels: Any, count: int) -> Tensor | None:
    if labels is None:
        return None
    try:
        found = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    if found.dim() != 1 or len(found) != count or found.is_floating_point() or found.is_complex():
        raise UnsupportedInput(f"labels are one whole number for each of {count} pictures; got {labels!r:.200}")
    return found.long()


def _are_paths(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(one, str | Path) for one in data)


def _numbered(indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"picture {index}" for index in indices)
