"""The pass over the data: counts of all images, and features of some of them.

Norms of all images go into counts of fixed size. Other analyses need more than counts; what they need is kept on the
CPU for a limited number of images, spread evenly over the data where its length is known:

    PLACES      images whose last norms and neighbor similarities are kept: two or three numbers per patch
    FEATURES    images whose last tokens, attention rows and pixels are kept as well, in half precision, within
                FEATURE_BYTES; for attention, components and probes
    OBJECTS     images of these whose keys and values are kept for object discovery

The threshold is known after the last image only. Because last norms are kept, finding the outliers takes no second
pass, and the data may be a stream that runs once.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._distributed import all_gather, rank_and_world_size
from vitrail.adapters import find, image_model
from vitrail.analysis.features import patch_features
from vitrail.analysis.norms import NormAccumulator
from vitrail.analysis.redundancy import neighbor_similarity, object_share
from vitrail.data.sample import Batch
from vitrail.data.spec import InputSpec
from vitrail.errors import BrokenPass, ImageError, UnsupportedInput, VitrailError
from vitrail.runtime.layout import layout_of
from vitrail.surgery.hooks import watch
from vitrail.surgery.recording import evaluating, to_model
from vitrail.tokens import TokenLayout

PLACES, FEATURES, OBJECTS = 4096, 600, 200
FEATURE_BYTES = 2**30

OBJECT_FEATURES = {"keys": "k", "values": "v"}
"""Features for object discovery, as recordings name them: keys suit DINO and DINOv2, values DeiT-III and OpenCLIP."""

PATCH_ROWS = 16
"""Patches per image whose attention rows are kept beside those of special tokens, evenly spread over the grid."""

MAX_NAMED = 100
"""Most images with non-finite values that are listed by name."""

NO_IMAGES = "there is no image to inspect; give at least one readable image"


class HalfTensor(NamedTuple):
    """A tensor in half precision and a power of two to multiply it by, so that large values do not overflow."""

    values: Tensor
    scale: float

    @classmethod
    def pack(cls, x: Tensor) -> HalfTensor:
        """Pack finite values."""
        if x.dtype in (torch.float16, torch.bfloat16):
            return cls(x.detach().cpu(), 1.0)
        largest = float(x.abs().max()) if x.numel() else 0.0
        scale = 2.0 ** max(0, math.frexp(largest)[1] - 15)
        return cls((x.detach() / scale).half().cpu(), scale)


class Features(NamedTuple):
    """Features of one image.

    ``objects`` are ``keys`` and ``values`` (P, D) of the last block's patches; empty without object discovery.
    """

    tokens: HalfTensor  # (N, D) leaving the last block
    special_norms: Tensor  # (S,) norms of the special tokens there
    attention: Tensor  # (H, Q, N) attention rows of the queries in the last block
    pixels: Tensor  # (C, H, W) as the model sees the image, from 0 to 255; see `to_pixels` for clips and sounds
    objects: dict[str, HalfTensor]
    boxes: Tensor | None  # (n, 4) true boxes in pixels; None if unknown


@dataclass(frozen=True)
class KeptImage:
    """One image: last norms (P,), similarity to neighbors (P,), foreground share (P,), and features if kept."""

    index: int
    name: str
    label: int | None
    layout: TokenLayout
    norms: Tensor
    similarity: Tensor
    foreground: Tensor | None
    kept_features: Features | None

    @property
    def features(self) -> Features:
        """The features of an image whose features were kept."""
        assert self.kept_features is not None
        return self.kept_features


@dataclass
class Collected:
    """Result of the pass, of one rank or of all ranks together.

    Attributes:
        queries: the tokens that attention rows belong to, by layout.
        seen, labelled: number of images, and of images with a label.
        not_finite: names of images with non-finite values, by index (the first hundred).
    """

    counts: NormAccumulator  # norms of all images and layers
    images: dict[int, KeptImage] = field(default_factory=dict)  # images kept, by index
    queries: dict[TokenLayout, tuple[int, ...]] = field(default_factory=dict)
    seen: int = 0
    labelled: int = 0
    fingerprint: int = 0  # hash of the images' indices and names, independent of their order
    skipped: list[tuple[str, str]] = field(default_factory=list)  # unreadable images, each with the reason
    not_finite: dict[int, str] = field(default_factory=dict)
    num_not_finite: int = 0  # number of such images
    notes: set[str] = field(default_factory=set)  # what could not be kept, and why

    def join(self, other: Collected) -> None:
        """Add the result of another rank."""
        self.counts.merge(other.counts)
        self.images |= other.images
        self.queries |= other.queries
        self.seen += other.seen
        self.labelled += other.labelled
        self.skipped += other.skipped
        self.num_not_finite += other.num_not_finite
        self.fingerprint = (self.fingerprint + other.fingerprint) % 2**64
        self.name_not_finite(other.not_finite)
        self.notes |= other.notes

    def name_not_finite(self, names: dict[int, str]) -> None:
        """Add names of images with non-finite values, by index."""
        self.not_finite = dict(sorted((self.not_finite | names).items())[:MAX_NAMED])


class Collector:
    """Runs a model over batches and keeps what the sections of a report need."""

    def __init__(self, model: nn.Module, spec: InputSpec, total: int | None, objects: bool) -> None:
        self.model, self.spec, self.total, self.objects = model, spec, total, objects
        self.found = find(model)
        self.depth = len(self.found.blocks)
        layouts = [self.found.adapter.layout_in(self.found.trunk, layer) for layer in range(self.depth)]
        layers = [layer for layer, layout in enumerate(layouts) if layout.grid == layouts[-1].grid]
        self.norms = watch(model, ("entry", "norms"), layers)
        self.collected = Collected(NormAccumulator(layers))

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Run the model on one batch."""
        size = self.found.adapter.channels_first(self.found.trunk, batch.images).shape[2:]
        queries = query_tokens(layout_of(self.found, tuple(size)))
        # Norms of all blocks, everything else of the last block: two sets of hooks, one forward pass.
        last = watch(self.model, ("embedding", "tokens", "k", "v", "attention"), [-1], queries)
        norms, recorded = run_hooked(self.model, batch.images, self.norms, last)
        self.collected.counts.add_recording(norms, batch.indices)
        self.collected.queries[recorded.layout] = queries
        self.collected.seen += len(batch.indices)
        self._keep(batch, recorded, norms.norms[self.depth - 1].float().cpu())

    def _keep(self, batch: Batch, recorded: Any, norms: Tensor) -> None:
        layout, embedding = recorded.layout, recorded.embedding
        last = {name: recorded.by_layer[name][self.depth - 1] for name in ("tokens", "attention", "k", "v")}
        values = (norms, embedding, *last.values())
        finite = torch.stack([one.isfinite().flatten(1).all(1).cpu() for one in values]).all(0)
        similarity = torch.full((len(norms), layout.num_patches), math.nan)
        if finite.any() and layout.grid[1] * layout.grid[2] > 1:
            rows = finite.to(embedding.device)
            pooled = self._pooled(embedding[rows], batch, layout)
            similarity[finite] = neighbor_similarity(pooled, layout.grid).float().cpu()
        foreground = self._foreground(batch, layout)
        most = self._most_features(last, batch.images)
        for row, (index, name) in enumerate(zip(batch.indices, map(str, batch.names), strict=True)):
            label = None if batch.labels is None or batch.labels[row] < 0 else int(batch.labels[row])
            self.collected.labelled += label is not None
            digest = hashlib.sha256(f"{index} {name}".encode(errors="surrogateescape")).digest()
            self.collected.fingerprint = (self.collected.fingerprint + int.from_bytes(digest[:8])) % 2**64
            if not finite[row]:
                self.collected.num_not_finite += 1
                self.collected.name_not_finite({index: name})
                continue
            slot = keep_slot(index, most, self.total)
            if slot is None and keep_slot(index, PLACES, self.total) is None:
                continue
            total = None if self.total is None else min(most, self.total)
            objects = slot is not None and self.objects and keep_slot(slot, OBJECTS, total) is not None
            self.collected.images[index] = KeptImage(
                index,
                name,
                label,
                layout,
                norms[row, layout.patches].clone(),
                similarity[row],
                None if foreground is None else foreground[row],
                None if slot is None else self._features(batch, row, layout, last, norms, objects),
            )

    def _pooled(self, embedding: Tensor, batch: Batch, layout: TokenLayout) -> Tensor:
        """Return patch embeddings (B, P, D) as their means at the places of a coarser grid."""
        if embedding.shape[1] == layout.num_patches:
            return embedding
        size = self.found.adapter.channels_first(self.found.trunk, batch.images).shape[2:]
        grid = self.found.adapter.layout(self.found.trunk, tuple(size)).grid
        cells = embedding.transpose(1, 2).unflatten(2, grid[1:])
        return F.adaptive_avg_pool2d(cells, layout.grid[1:]).flatten(2).transpose(1, 2)

    def _features(
        self, batch: Batch, row: int, layout: TokenLayout, last: dict[str, Tensor], norms: Tensor, objects: bool
    ) -> Features:
        kept = {
            name: HalfTensor.pack(patch_features(last[letter][row : row + 1], layout)[0])
            for name, letter in (OBJECT_FEATURES.items() if objects else ())
        }
        return Features(
            HalfTensor.pack(last["tokens"][row]),
            norms[row, : layout.num_special],
            last["attention"][row].half().cpu(),
            to_pixels(batch.images[row], self.spec, layout.grid[0]),
            kept,
            None if batch.boxes is None else torch.tensor(batch.boxes[row], dtype=torch.float64).reshape(-1, 4),
        )

    def _most_features(self, last: dict[str, Tensor], images: Tensor) -> int:
        """Return the number of images whose features are kept; the same on every rank."""
        each = 2 * (last["tokens"][0].numel() + last["attention"][0].numel()) + images[0].numel()
        objects = 2 * sum(last[letter][0].numel() for letter in OBJECT_FEATURES.values()) if self.objects else 0
        if OBJECTS * (each + objects) > FEATURE_BYTES:
            return max(1, FEATURE_BYTES // (each + objects))
        return min(FEATURES, (FEATURE_BYTES - OBJECTS * objects) // each)

    def _foreground(self, batch: Batch, layout: TokenLayout) -> Tensor | None:
        if batch.masks is None:
            return None
        try:
            return object_share(batch.masks.cpu(), layout.grid)
        except VitrailError as error:
            self.collected.notes.add(f"masks were not used: {error}")
            return None


def run_hooked(model: nn.Module, images: Tensor, *hooks: Any) -> list[Any]:
    """Run a model on images; return what each set of hooks recorded."""
    with ExitStack() as stack:
        for one in hooks:
            stack.enter_context(one.hooked())
        stack.enter_context(evaluating(model))
        image_model(model)(to_model(model, images))
    recorded = [one.take() for one in hooks]
    if any(len(calls) != 1 for calls in recorded):
        runs = max(len(calls) for calls in recorded)
        raise BrokenPass(f"one call of the model ran its blocks {runs} times; inspect the trunk by itself")
    return [calls[0] for calls in recorded]


def keep_slot(index: int, most: int, total: int | None) -> int | None:
    """Return which of at most ``most`` kept images this one is; None if it is not kept.

    If the total is known and larger, kept images are evenly spread: class directories come one after the other.
    """
    if total is None or total <= most:
        return index if index < most else None
    slot = index * most // total
    return slot if index == 0 or (index - 1) * most // total != slot else None


def to_pixels(values: Tensor, spec: InputSpec, steps: int = 1) -> Tensor:
    """Return one input of a model as an image (C, H, W): integers from 0 to 255.

    Of a clip these are frames below each other, one for each step in time of the patch grid. Spectrograms are scaled
    to their own range.
    """
    plain = spec.plain(values.detach().float().cpu()[None])[0]
    if plain.dim() == 4:
        middles = [(2 * step + 1) * plain.shape[1] // (2 * steps) for step in range(steps)]
        plain = plain[:, middles].flatten(1, 2)
    if spec.modality == "audio":
        low, high = plain.nan_to_num().aminmax()
        pixels = (plain - low) / (high - low).clamp(min=1e-12) * 255
    else:
        channels = len(plain)
        mean, std = (
            torch.tensor(given if len(given) == channels else [sum(given) / len(given)] * channels).view(-1, 1, 1)
            for given in (spec.mean, spec.std)
        )
        pixels = (plain * std + mean) * (spec.scale if spec.of_bytes else 255)
    return pixels.round().clamp(0, 255).nan_to_num().to(torch.uint8)


def query_tokens(layout: TokenLayout) -> tuple[int, ...]:
    """Return the tokens whose attention rows are kept: all special tokens, and some patches."""
    step = max(1, layout.num_patches // PATCH_ROWS)
    rows = range(step // 2, layout.num_patches, step)[:PATCH_ROWS]
    return (*range(layout.num_special), *(layout.num_special + row for row in rows))


def gather(collected: Collected, error: Exception | None) -> Collected | None:
    """Join the results of all ranks on rank 0; return None on the others.

    Sums are of integers or exact, and kept images go by index, so the result does not depend on the world size. A rank
    that failed reports to the others first, so that all of them raise. A rank without readable images has not failed
    if another rank has some.
    """
    rank, world = rank_and_world_size()
    failed = error is not None and not (world > 1 and isinstance(error, ImageError) and collected.seen == 0)
    state = f"{type(error).__name__}: {error}" if failed else None, collected.seen
    states = all_gather(state) if world > 1 else [state]
    if error is not None and failed:
        raise error
    for other, (failure, _) in enumerate(states):
        if failure is not None:
            raise UnsupportedInput(f"rank {other} of {world} could not inspect its part of the data. {failure}")
    if not any(seen for _, seen in states):
        raise error or (ImageError if collected.skipped else UnsupportedInput)(NO_IMAGES)
    parts: list[Any] | None = [collected] * world if rank == 0 else None
    if world > 1:
        dist.gather_object(collected, parts)
    if parts is None:
        return None
    for part in parts[1:]:
        collected.join(part)
    collected.images = dict(sorted(collected.images.items()))
    collected.skipped.sort()
    return collected
