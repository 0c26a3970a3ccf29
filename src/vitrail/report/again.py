"""Some pictures a second time, and made sure to be the same: for what is only worth looking at in a few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batches import Batches
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedInput
from vitrail.report.looking import Picture, pixels
from vitrail.report.study import features_of


@dataclass(frozen=True)
class Again:
    """Pictures that were looked at before, as batches that can be walked over any number of times.

    Attributes:
        feed: where they come from.
        preprocessing: how files are prepared.
        batch_size: pictures at once; batches of the user's own are taken as they are.
        pictures: those to give, with what was kept of them.
    """

    feed: Batches
    preprocessing: InputSpec
    batch_size: int
    pictures: Sequence[Picture]

    def __iter__(self) -> Iterator[Tensor]:
        return (piece.images for piece in self.pieces())

    def of(self, pictures: Sequence[Picture], batch_size: int | None = None) -> Again:
        """Give others of the pictures that were looked at."""
        return Again(self.feed, self.preprocessing, batch_size or self.batch_size, pictures)

    def pieces(self) -> Iterator[Any]:
        """Give the batches; raise where a picture is not what it was."""
        if self.feed.runs_once:
            raise UnsupportedInput(
                "the pictures came from an iterator, which runs once, and cannot be looked at again; give batches that "
                "can be walked over several times, such as a list or a loader"
            )
        known = {picture.index: features_of(picture).image for picture in self.pictures}
        for piece in self.feed.select(known).batches(self.preprocessing, self.batch_size):
            for index, image in zip(piece.indices, piece.images, strict=True):
                if not torch.equal(pixels(image, self.preprocessing), known.pop(index)):
                    raise _changed(index)
            yield piece
        if known:
            raise _changed(next(iter(known)))


def _changed(index: int) -> UnsupportedInput:
    return UnsupportedInput(
        f"picture {index} was another one when it was looked at again; give pictures that come in the same order and "
        "unchanged each time, from a loader that does not shuffle"
    )
