"""What there is to inspect, as a stream of batches: files, a collection, a tensor, or batches of the user's own.

Every picture has a number, the same in every process, so that what several processes saw can be put in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.pictures.preprocessing import Preprocessing

Boxes = Sequence[tuple[float, float, float, float]]


class Piece(NamedTuple):
    """One batch: the same fields as a batch of a collection."""

    images: Tensor
    indices: tuple[int, ...]
    names: tuple[str, ...]
    labels: Tensor | None = None
    masks: Tensor | None = None
    boxes: Sequence[Boxes | None] | None = None


@dataclass
class Source:
    """Pictures to inspect.

    Attributes:
        data: a collection, a tensor, or an iterable of batches.
        kind: the same in words.
        labels: labels of a tensor's pictures.
        limit: most pictures to look at.
    """

    data: Any
    kind: str
    labels: Tensor | None = None
    limit: int | None = None
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

    def batches(
        self, preprocessing: Preprocessing, batch_size: int, rank: int = 0, world: int = 1
    ) -> Iterator[Piece | Any]:
        """Give the batches of one of ``world`` processes.

        Of batches that the user makes, each process is given all and looks at every ``world``-th.
        """
        if self.kind == "collection":
            yield from self._from_collection(preprocessing, batch_size, rank, world)
        elif self.kind == "tensor":
            yield from self._from_tensor(batch_size, rank, world)
        else:
            yield from self._from_batches(rank, world)

    def _from_collection(
        self, preprocessing: Preprocessing, batch_size: int, rank: int, world: int
    ) -> Iterator[Piece | Any]:
        part = self.data.part(rank, world) if world > 1 else self.data
        limit = None if self.limit is None else max(0, -(-(self.limit - rank) // world))
        if limit == 0:
            return
        try:
            yield from part.batches(preprocessing, batch_size, limit=limit)
        finally:
            self.skipped = [(str(name), str(reason)) for name, reason in part.skipped]

    def _from_tensor(self, batch_size: int, rank: int, world: int) -> Iterator[Piece]:
        count = self.total or 0
        for places in torch.arange(rank, count, world).split(batch_size):
            if len(places):
                indices = tuple(places.tolist())
                labels = None if self.labels is None else self.labels[places]
                yield Piece(self.data[places.to(self.data.device)], indices, _numbered(indices), labels)

    def _from_batches(self, rank: int, world: int) -> Iterator[Piece]:
        start = 0
        for number, batch in enumerate(self.data):
            images, labels = batch_parts(batch)
            if self.limit is not None:
                images = images[: self.limit - start]
                labels = None if labels is None else labels[: self.limit - start]
            indices = tuple(range(start, start + len(images)))
            start += len(images)
            if number % world == rank and len(images):
                yield Piece(images, indices, _numbered(indices), labels)
            if self.limit is not None and start >= self.limit:
                return


def open_source(data: Any, *, limit: int | None = None, labels: Any = None) -> Source:
    """Take whatever a user calls pictures."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidOption(f"limit is the most pictures to look at, 1 or more; got {limit!r}")
    if data is None or isinstance(data, str | os.PathLike) or _are_paths(data):
        from vitrail.pictures.collection import open_collection

        return Source(open_collection(data, limit=limit, labels=labels), "collection", limit=limit)
    if all(hasattr(data, name) for name in ("batches", "part", "__len__")):
        return Source(data, "collection", limit=limit)
    if isinstance(data, Tensor):
        if data.dim() != 4 or not len(data):
            raise UnsupportedInput(f"pictures are one or more of (B, C, H, W); got a tensor of {tuple(data.shape)}")
        return Source(data, "tensor", _as_labels(labels, len(data)), limit)
    if isinstance(data, Iterable):
        if labels is not None:
            raise InvalidOption("labels of batches come with them, as (pictures, labels); got both")
        return Source(data, "batches", limit=limit)
    raise UnsupportedInput(
        f"data to inspect are files, a folder, a collection, a tensor (B, C, H, W) or batches of these; got "
        f"{type(data).__name__}"
    )


def batch_parts(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Take a batch apart: pictures, or pictures and one whole number for each."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    images = parts[0] if parts else None
    if not isinstance(images, Tensor) or images.dim() != 4:
        what = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise UnsupportedInput(f"a batch is a tensor (B, C, H, W), or (pictures, labels); got {what}")
    return images, _as_labels(parts[1], len(images)) if len(parts) > 1 else None


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
