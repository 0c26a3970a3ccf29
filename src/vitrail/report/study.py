"""What was kept of some pictures, put together for the analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.analysis.norms import Norms
from vitrail.analysis.probes.classes import one_token_each
from vitrail.errors import UnsupportedInput
from vitrail.report.looking import Evidence, Features, Packed, Picture
from vitrail.tokens import Role, TokenLayout

Thing = TypeVar("Thing")

SHOWN = 8
"""Pictures that a report shows."""


@dataclass(frozen=True)
class Study:
    """The pictures of one layout, with what is known of all.

    Attributes:
        layout: which token is which.
        norms: what the norms of all pictures say.
        pictures: those kept, in order.
        queries: the tokens that attention rows belong to.
        device: where to compute.
        seed: of whatever is drawn.
        other_sizes: pictures left out, since their grid is another one than the first picture's.
    """

    layout: TokenLayout
    norms: Norms
    pictures: tuple[Picture, ...]
    queries: tuple[int, ...]
    device: torch.device
    seed: int
    other_sizes: int

    @classmethod
    def of(cls, evidence: Evidence, device: torch.device, seed: int) -> Study | None:
        """Put together what was seen; None where nothing could be kept."""
        if not evidence.pictures:
            return None
        every = list(evidence.pictures.values())
        layout = every[0].layout
        same = tuple(picture for picture in every if picture.layout == layout)
        queries = evidence.queries[layout]
        return cls(layout, evidence.counts.result(), same, queries, device, seed, len(every) - len(same))

    @cached_property
    def featured(self) -> tuple[Picture, ...]:
        """Pictures whose features were kept."""
        return tuple(picture for picture in self.pictures if picture.features is not None)

    @cached_property
    def objects(self) -> tuple[Picture, ...]:
        """Pictures whose keys and values were kept."""
        return tuple(picture for picture in self.featured if features_of(picture).objects)

    @cached_property
    def shown(self) -> tuple[Picture, ...]:
        """Pictures for the eye: some evenly spread, the same for every model, and those with the most outliers."""
        candidates = self.objects or self.featured
        counts = self.outliers(candidates).sum(1).tolist()
        places = spread(range(len(candidates)), SHOWN // 2)
        ranked = sorted(set(range(len(candidates))) - set(places), key=lambda place: (-counts[place], place))
        places += [place for place in ranked if counts[place]][: SHOWN - len(places)]
        places += spread([place for place in range(len(candidates)) if place not in places], SHOWN - len(places))
        return tuple(candidates[place] for place in sorted(places))

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """Name the special tokens as probes do: "class", "register 1", ..."""
        nothing = torch.zeros(1, self.layout.num_patches, dtype=torch.bool)
        kinds = one_token_each(torch.zeros(1, self.layout.num_tokens, 1), self.layout, nothing)
        return tuple(kinds)[: self.layout.num_special]

    @cached_property
    def registers(self) -> tuple[int, ...]:
        """Positions of the registers."""
        return tuple(self.layout.indices(Role.REGISTER))

    def outliers(self, pictures: tuple[Picture, ...]) -> Tensor:
        """Mark the outliers (B, P) of some pictures."""
        if not pictures:
            return torch.zeros(0, self.layout.num_patches, dtype=torch.bool)
        norms = torch.stack([picture.norms for picture in pictures])
        if self.norms.threshold is None:
            return torch.zeros_like(norms, dtype=torch.bool)
        return norms > self.norms.threshold

    @cached_property
    def tokens(self) -> Tensor:
        """Tokens (B, N, D) of the featured pictures."""
        return self._stacked([features_of(picture).tokens for picture in self.featured])

    def object_features(self, name: str) -> Tensor:
        """Keys or values (B, P, D) of the pictures that objects are looked for in."""
        return self._stacked([features_of(picture).objects[name] for picture in self.objects])

    @cached_property
    def attention(self) -> Tensor:
        """Attention rows (B, H, Q, N) of the featured pictures."""
        self._some(self.featured)
        return torch.stack([features_of(picture).attention for picture in self.featured])

    @cached_property
    def special_norms(self) -> Tensor:
        """Norms (B, S) of the special tokens of the featured pictures."""
        return torch.stack([features_of(picture).special_norms for picture in self.featured])

    def images(self, pictures: tuple[Picture, ...]) -> Tensor:
        """Pictures (B, C, H, W) from 0 to 255, in whole numbers."""
        return torch.stack([features_of(picture).image for picture in pictures])

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        height, width = features_of(self.featured[0]).image.shape[1:]
        return height // self.layout.grid[1], width // self.layout.grid[2]

    def _stacked(self, parts: list[Packed]) -> Tensor:
        """Put packed tensors together: in half precision where nothing was scaled, in float32 otherwise."""
        self._some(parts)
        if all(part.scale == 1.0 for part in parts):
            return torch.stack([part.values for part in parts]).to(self.device)
        return torch.stack([part.values.float() * part.scale for part in parts]).to(self.device)

    def _some(self, parts: list[Packed] | tuple[Picture, ...]) -> None:
        if not parts:
            raise UnsupportedInput("no picture is left whose numbers are all finite")


def features_of(picture: Picture) -> Features:
    """Give the features of a picture that has some."""
    assert picture.features is not None
    return picture.features


def spread(things: Sequence[Thing], most: int) -> list[Thing]:
    """Choose some of several things, evenly spread."""
    most = min(most, len(things))
    return [things[(2 * number + 1) * len(things) // (2 * most)] for number in range(most)]
