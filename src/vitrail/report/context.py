"""The input of sections: the kept images of one layout, and a second pass over some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitrail.analysis.norms import Norms
from vitrail.data.batches import Batches
from vitrail.data.sample import Batch
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedInput
from vitrail.report.collect import Collected, HalfTensor, KeptImage, to_pixels
from vitrail.report.report import ShownImage
from vitrail.tokens import TokenLayout, token_names

T = TypeVar("T")

Progress = Callable[[str, int, int | None], object]
"""Called with the stage, how much of it is done, and its total (None if unknown)."""

SHOWN = 8
"""Images that a report shows."""


@dataclass(frozen=True)
class Context:
    """Everything that a section may use to compute its values.

    Attributes:
        data, spec, batch_size: where images come from, their preprocessing, and images per batch.
    """

    model: nn.Module  # the inspected model
    layout: TokenLayout  # the token layout of the kept images
    norms: Norms  # norms of all images, with threshold and verdict
    images: tuple[KeptImage, ...]  # kept images, in order
    queries: tuple[int, ...]  # the tokens that attention rows belong to
    other_sizes: int  # number of kept images left out because their patch grid is not the first image's
    data: Batches
    spec: InputSpec
    batch_size: int
    device: torch.device  # device to compute on
    seed: int  # seed of splits and draws
    progress: Progress  # callback
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # values of the sections computed so far

    @classmethod
    def create(cls, collected: Collected, model: nn.Module, **settings: Any) -> Context | None:
        """Return the context for what was collected; None if no image was kept."""
        if not collected.images:
            return None
        every = list(collected.images.values())
        layout = every[0].layout
        same = tuple(image for image in every if image.layout == layout)
        norms, queries = collected.counts.result(), collected.queries[layout]
        return cls(model, layout, norms, same, queries, len(every) - len(same), **settings)

    @cached_property
    def featured(self) -> tuple[KeptImage, ...]:
        """Images whose features were kept."""
        return tuple(image for image in self.images if image.kept_features is not None)

    @cached_property
    def with_objects(self) -> tuple[KeptImage, ...]:
        """Images whose keys and values were kept."""
        return tuple(image for image in self.featured if image.features.objects)

    @cached_property
    def chosen(self) -> tuple[KeptImage, ...]:
        """Images to show: half of them evenly spread and the same for every model, then those with most outliers."""
        candidates = self.with_objects or self.featured
        counts = self.outliers(candidates).sum(1).tolist()
        places = spread_evenly(range(len(candidates)), SHOWN // 2)
        ranked = sorted(set(range(len(candidates))) - set(places), key=lambda place: (-counts[place], place))
        places += [place for place in ranked if counts[place]][: SHOWN - len(places)]
        places += spread_evenly([place for place in range(len(candidates)) if place not in places], SHOWN - len(places))
        return tuple(candidates[place] for place in sorted(places))

    @cached_property
    def shown(self) -> list[ShownImage]:
        """The chosen images as the report shows them; sections add their own maps."""
        time, height, width = self.layout.grid
        outliers = self.outliers(self.chosen)
        names = self.data.class_names or ()
        return [
            ShownImage(
                index=image.index,
                name=image.name,
                label=None if image.label is None else dict(enumerate(names)).get(image.label, f"class {image.label}"),
                grid=(time * height, width),
                size=self.image_size,
                norms=rounded(image.norms),
                outliers=marked.nonzero().flatten().tolist(),
                truth=[] if image.features.boxes is None else image.features.boxes.tolist(),
                pixels=image.features.pixels,
            )
            for image, marked in zip(self.chosen, outliers, strict=True)
        ]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        height, width = self.featured[0].features.pixels.shape[1:]
        return int(height), int(width)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        time, height, width = self.layout.grid
        return self.image_size[0] // (time * height), self.image_size[1] // width

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """Names of the special tokens, as probes use them: "class", "register 1", ..."""
        return token_names(self.layout.special)

    def outliers(self, images: Sequence[KeptImage]) -> Tensor:
        """Return a mask (B, P) of the outliers of some images."""
        if not images:
            return torch.zeros(0, self.layout.num_patches, dtype=torch.bool)
        norms = torch.stack([image.norms for image in images])
        if self.norms.threshold is None:
            return torch.zeros_like(norms, dtype=torch.bool)
        return norms > self.norms.threshold

    @cached_property
    def tokens(self) -> Tensor:
        """Tokens (B, N, D) of the featured images."""
        return self._unpack([image.features.tokens for image in self.featured])

    @property
    def patch_tokens(self) -> Tensor:
        """Patch tokens (B, P, D) of the featured images."""
        return self.tokens[:, self.layout.patches]

    def object_features(self, name: str) -> Tensor:
        """Return keys or values (B, P, D) of the images kept for object discovery."""
        return self._unpack([image.features.objects[name] for image in self.with_objects])

    @cached_property
    def attention(self) -> Tensor:
        """Attention rows (B, H, Q, N) of the featured images."""
        return torch.stack(_not_empty([image.features.attention for image in self.featured]))

    @cached_property
    def special_norms(self) -> Tensor:
        """Norms (B, S) of the special tokens of the featured images."""
        return torch.stack([image.features.special_norms for image in self.featured])

    def _unpack(self, parts: list[HalfTensor]) -> Tensor:
        """Stack packed tensors: in half precision if none was scaled, in float32 otherwise."""
        if all(part.scale == 1.0 for part in _not_empty(parts)):
            return torch.stack([part.values for part in parts]).to(self.device)
        return torch.stack([part.values.float() * part.scale for part in parts]).to(self.device)

    def second_pass(self, images: Sequence[KeptImage], batch_size: int | None = None) -> SecondPass:
        """Return some of the images as batches to run the model on again."""
        return SecondPass(self.data, self.spec, images, batch_size or self.batch_size)


@dataclass(frozen=True)
class SecondPass:
    """Images that were run before, as batches to iterate over any number of times. Iterating yields tensors.

    Attributes:
        data, spec: where the images come from, and their preprocessing.
    """

    data: Batches
    spec: InputSpec
    images: Sequence[KeptImage]  # which of them, with what was kept
    batch_size: int  # images per batch; batches made by the user are taken as they are

    def __iter__(self) -> Iterator[Tensor]:
        return (batch.images for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """Yield the batches. Raise if an image is not the same as in the first pass."""
        if self.data.runs_once:
            raise UnsupportedInput(
                "the data is an iterator, which runs once, so images cannot be run a second time; give batches that "
                "can be iterated several times, such as a list or a data loader"
            )
        steps = max((image.layout.grid[0] for image in self.images), default=1)
        known = {image.index: image.features.pixels for image in self.images}
        for batch in self.data.select(known).batches(self.spec, self.batch_size):
            for index, image in zip(batch.indices, batch.images, strict=True):
                if torch.equal(to_pixels(image, self.spec, steps), known[index]):
                    known.pop(index)
            if not known.keys().isdisjoint(batch.indices):
                break
            yield batch
        if known:
            raise UnsupportedInput(
                f"image {next(iter(known))} changed between the first and the second pass; use data that yields the "
                "same images in the same order each time, such as a data loader that does not shuffle or augment"
            )


def spread_evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spread."""
    most = min(most, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * most)] for number in range(most)]


def rounded(norms: Tensor) -> list[float]:
    """Round norms to five digits, for the JSON."""
    return [float(f"{norm:.5g}") for norm in norms.tolist()]


def _not_empty(parts: list[T]) -> list[T]:
    if not parts:
        raise UnsupportedInput("no image is left whose values are all finite")
    return parts
