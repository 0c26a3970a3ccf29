"""One pass over the pictures: what is counted of all of them, and what is kept of some.

Norms of all pictures go into counts of fixed size. What other analyses need is kept for a limited number of pictures,
spread evenly over the data where its length is known, on the CPU:

    PLACES      pictures whose last norms and neighbour similarities are kept: two or three numbers a patch
    FEATURES    pictures whose last tokens, attention rows and pixels are kept as well, in half precision, within
                FEATURE_BYTES; probes, attention and principal components are computed on them
    OBJECTS     those of them whose keys and values are kept for object discovery

Which tokens are outliers is known after the last picture only. A second pass is not needed for it, since the last
layer's norms are kept: the data may be a stream that runs once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.features import patch_features
from vitrail.analysis.norms import NormAccumulator
from vitrail.analysis.redundancy import neighbor_similarity, object_share
from vitrail.data.spec import Preprocessing
from vitrail.errors import BrokenPass, VitrailError
from vitrail.runtime.layout import layout_of
from vitrail.surgery.hooks import watch
from vitrail.surgery.recording import evaluating, to_model
from vitrail.tokens import TokenLayout

PLACES, FEATURES, OBJECTS = 4096, 600, 200
FEATURE_BYTES = 2**30
OBJECT_FEATURES = {"keys": "k", "values": "v"}
"""What objects are looked for in, and its letter: keys suit DINO and DINOv2, values DeiT-III and OpenCLIP."""

PATCH_ROWS = 16
"""Patches whose attention rows are kept beside those of special tokens, evenly spread over the grid."""


@dataclass(frozen=True)
class Packed:
    """A tensor in half precision, times a power of two, so that large values do not overflow."""

    values: Tensor
    scale: float

    @classmethod
    def of(cls, x: Tensor) -> Packed:
        """Pack finite values."""
        if x.dtype in (torch.float16, torch.bfloat16):
            return cls(x.detach().cpu(), 1.0)
        largest = float(x.abs().max()) if x.numel() else 0.0
        scale = 2.0 ** max(0, math.frexp(largest)[1] - 15)
        return cls((x.detach() / scale).half().cpu(), scale)


@dataclass(frozen=True)
class Features:
    """What is kept of one picture for probes, attention and principal components.

    Attributes:
        tokens: (N, D) leaving the last block.
        special_norms: (S,) norms of the special tokens there.
        attention: (H, Q, N) rows of the queries, in the last block.
        image: (C, H, W), as the model sees it, from 0 to 255.
        objects: ``keys`` and ``values`` (P, D) of the last block's patches; empty where no object is looked for.
        boxes: (n, 4) true boxes, in pixels; None where there are none.
    """

    tokens: Packed
    special_norms: Tensor
    attention: Tensor
    image: Tensor
    objects: dict[str, Packed]
    boxes: Tensor | None


@dataclass(frozen=True)
class Picture:
    """What is kept of one picture: norms after the last layer (P,), similarity to neighbours (P,), foreground (P,)."""

    index: int
    name: str
    label: int | None
    layout: TokenLayout
    norms: Tensor
    similarity: Tensor
    foreground: Tensor | None
    features: Features | None


@dataclass
class Evidence:
    """Everything that one process saw, or, joined, that all of them saw.

    Attributes:
        counts: norms of all pictures, all layers.
        pictures: what was kept, by the pictures' numbers.
        queries: the tokens that attention rows belong to, by layout.
        seen, labelled: number of pictures, and of those with a label.
        fingerprint: of the pictures' numbers and names, in whatever order they were seen.
        skipped: pictures that could not be read, each with the reason.
        not_finite: names of pictures with numbers that are not finite, by their numbers (the first hundred).
        notes: what could not be kept, and why.
    """

    counts: NormAccumulator
    pictures: dict[int, Picture] = field(default_factory=dict)
    queries: dict[TokenLayout, tuple[int, ...]] = field(default_factory=dict)
    seen: int = 0
    labelled: int = 0
    fingerprint: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    not_finite: dict[int, str] = field(default_factory=dict)
    num_not_finite: int = 0
    notes: set[str] = field(default_factory=set)

    def join(self, other: Evidence) -> None:
        """Add what another process saw."""
        self.counts.merge(other.counts)
        self.pictures |= other.pictures
        self.queries |= other.queries
        self.seen += other.seen
        self.labelled += other.labelled
        self.fingerprint = (self.fingerprint + other.fingerprint) % 2**64
        self.skipped += other.skipped
        self.not_finite = dict(sorted((self.not_finite | other.not_finite).items())[:100])
        self.num_not_finite += other.num_not_finite
        self.notes |= other.notes


def chosen(index: int, most: int, total: int | None) -> int | None:
    """Say which of at most ``most`` kept pictures this one is; None where it is not kept.

    Where the total is known and larger, those kept are evenly spread: folders of classes come one after the other.
    """
    if total is None or total <= most:
        return index if index < most else None
    place = index * most // total
    return place if index == 0 or (index - 1) * most // total != place else None


class Looker:
    """Runs a model over batches and keeps what an inspection needs."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, total: int | None, objects: bool) -> None:
        found = find(model)
        self.model, self.preprocessing, self.total, self.objects = model, preprocessing, total, objects
        self.depth = len(found.blocks)
        self.last = self.depth - 1
        self.layout_for: Callable[[tuple[int, int]], TokenLayout] = lambda size: layout_of(found, size)
        self.norms = watch(model, ("norms",))
        self.evidence = Evidence(NormAccumulator(self.depth))

    @torch.no_grad()
    def look(self, piece: Any) -> None:
        """Look at one batch."""
        size = (piece.images.shape[-2], piece.images.shape[-1])
        queries = query_tokens(self.layout_for(size))
        # Tokens, keys and attention are those of the last block, norms those of all: two watches, one forward run.
        last = watch(self.model, ("embedding", "tokens", "k", "v", "attention"), [-1], queries)
        with self.norms.hooked(), last.hooked(), evaluating(self.model):
            self.model(to_model(self.model, piece.images))
        norms, seen = self.norms.take(), last.take()
        if len(norms) != 1 or len(seen) != 1:
            raise BrokenPass(f"one call of the model ran its blocks {len(seen)} times; inspect the trunk by itself")
        layout, evidence = seen[0].layout, self.evidence
        patches = torch.stack([norms[0].by_layer["norms"][layer][:, layout.patches] for layer in range(self.depth)])
        evidence.counts.add(patches, piece.indices)
        evidence.queries[layout] = queries
        evidence.seen += len(piece.indices)
        self._keep(piece, seen[0], norms[0].by_layer["norms"][self.last].float().cpu())

    def _keep(self, piece: Any, seen: Any, norms: Tensor) -> None:
        layout, evidence = seen.layout, self.evidence
        tokens, attention = (seen.by_layer[name][self.last] for name in ("tokens", "attention"))
        objects = {name: seen.by_layer[letter][self.last] for name, letter in OBJECT_FEATURES.items()}
        finite = _finite(norms) & _finite(tokens) & _finite(attention) & _finite(seen.embedding)
        for features in objects.values():
            finite &= _finite(features)
        similarity = torch.full((len(norms), layout.num_patches), math.nan)
        if finite.any() and min(layout.grid[1:]) > 0 and layout.grid[1] * layout.grid[2] > 1:
            here = finite.to(seen.embedding.device)
            similarity[finite] = neighbor_similarity(seen.embedding[here], layout.grid).float().cpu()
        foreground = self._foreground(piece, layout)
        most = self._most(tokens, attention, piece.images, list(objects.values()))
        for row, (index, name) in enumerate(zip(piece.indices, piece.names, strict=True)):
            label = None if piece.labels is None else int(piece.labels[row])
            label = None if label is not None and label < 0 else label
            evidence.labelled += label is not None
            digest = hashlib.sha256(f"{index} {name}".encode(errors="surrogateescape")).digest()
            evidence.fingerprint = (evidence.fingerprint + int.from_bytes(digest[:8])) % 2**64
            if not finite[row]:
                evidence.num_not_finite += 1
                evidence.not_finite = dict(sorted((evidence.not_finite | {index: str(name)}).items())[:100])
                continue
            place = chosen(index, most, self.total)
            if place is None and chosen(index, PLACES, self.total) is None:
                continue
            kept = None
            if place is not None:
                among = None if self.total is None else min(most, self.total)
                wanted = self.objects and chosen(place, OBJECTS, among) is not None
                kept = Features(
                    Packed.of(tokens[row]),
                    norms[row, : layout.num_special],
                    attention[row].half().cpu(),
                    pixels(piece.images[row], self.preprocessing),
                    {
                        name: Packed.of(patch_features(features[row : row + 1], layout)[0])
                        for name, features in (objects if wanted else {}).items()
                    },
                    _boxes(piece.boxes[row]) if piece.boxes is not None else None,
                )
            evidence.pictures[index] = Picture(
                index,
                str(name),
                label,
                layout,
                norms[row, layout.patches].clone(),
                similarity[row],
                None if foreground is None else foreground[row],
                kept,
            )

    def _most(self, tokens: Tensor, attention: Tensor, images: Tensor, objects: Sequence[Tensor]) -> int:
        """Say of how many pictures features can be kept; the same in every process."""
        each = 2 * (tokens[0].numel() + attention[0].numel()) + images[0].numel()
        more = 2 * sum(features[0].numel() for features in objects) if self.objects else 0
        if OBJECTS * (each + more) > FEATURE_BYTES:
            return max(1, FEATURE_BYTES // (each + more))
        return min(FEATURES, (FEATURE_BYTES - OBJECTS * more) // each)

    def _foreground(self, piece: Any, layout: TokenLayout) -> Tensor | None:
        if piece.masks is None:
            return None
        try:
            return object_share(piece.masks.cpu(), layout.grid)
        except VitrailError as error:
            self.evidence.notes.add(f"masks were not used: {error}")
            return None


def pixels(image: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the preparation of a picture (C, H, W): from 0 to 255, in whole numbers."""
    channels = len(image)
    mean, std = (
        torch.tensor(values if channels == 3 else [sum(values) / 3] * channels).view(-1, 1, 1)
        for values in (preprocessing.mean, preprocessing.std)
    )
    return ((image.detach().float().cpu() * std + mean) * 255).round().clamp(0, 255).nan_to_num().to(torch.uint8)


def query_tokens(layout: TokenLayout) -> tuple[int, ...]:
    """Name the tokens whose attention is looked at: all special ones, and some patches."""
    step = max(1, layout.num_patches // PATCH_ROWS)
    rows = range(step // 2, layout.num_patches, step)[:PATCH_ROWS]
    return (*range(layout.num_special), *(layout.num_special + row for row in rows))


def _boxes(boxes: Sequence[Any] | None) -> Tensor | None:
    if boxes is None:
        return None
    return torch.tensor([[float(end) for end in box] for box in boxes], dtype=torch.float64).reshape(-1, 4)


def _finite(x: Tensor) -> Tensor:
    return torch.isfinite(x.detach()).flatten(1).all(1).cpu()
