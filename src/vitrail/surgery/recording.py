"""``vitrail.record``: what passes through a model, kept while the model runs as it always does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.surgery.hooks import Seen, watch
from vitrail.surgery.selection import BY_LAYER
from vitrail.tokens import TokenLayout

Layers = dict[int, Tensor]

Pictures = Any
"""A file, a folder, several files, a parquet file; a collection of them; prepared pictures (B, C, H, W), or videos
(B, C, T, H, W) for a model of such; or batches of them, each a tensor or a tuple that begins with one: whatever
:func:`~vitrail.data.batches.open_batches` takes."""


@dataclass(frozen=True)
class Recording:
    """What was seen of B pictures, with N tokens, P patches, D channels, H heads; empty what nobody asked for.

    Attributes:
        layout: which token is which.
        layers: the blocks that were looked into.
        queries: the tokens that attention rows belong to, in their order.
        embedding: patches right after the patch embedding, before positions (B, P, D).
        tokens: what leaves each block, before the model's last norm (B, N, D).
        norms: the L2 norm of it, in float32 (B, N).
        q: queries (B, H, N, d), with their norm and before any rotation; ``k`` and ``v`` likewise.
        attention: rows of the query tokens (B, H, Q, N); each sums to one.
        mlp: what the MLP's last linear layer is given (B, N, hidden).
    """

    layout: TokenLayout
    layers: tuple[int, ...]
    queries: tuple[int, ...] = ()
    embedding: Tensor | None = None
    tokens: Layers = field(default_factory=dict)
    norms: Layers = field(default_factory=dict)
    q: Layers = field(default_factory=dict)
    k: Layers = field(default_factory=dict)
    v: Layers = field(default_factory=dict)
    attention: Layers = field(default_factory=dict)
    mlp: Layers = field(default_factory=dict)

    def __len__(self) -> int:
        tensors = [self.embedding] if self.embedding is not None else []
        tensors += [tensor for name in BY_LAYER for tensor in getattr(self, name).values()]
        return len(tensors[0]) if tensors else 0


def record(
    model: nn.Module,
    images: Pictures,
    what: str | Sequence[str] = ("tokens",),
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    *,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: Mapping[str, Any] | None = None,
) -> Recording:
    """Run a model and keep what was asked for, of all pictures together.

    The model is put into evaluation mode for the time of it and is otherwise not touched; it may be merged, and then
    every original position shows the token that it went into.

    Args:
        model: any supported model.
        images: pictures, as files or prepared; see :data:`Pictures`. Files that cannot be read are left out, with a
            warning.
        what: ``embedding``, ``tokens``, ``norms``, ``q``, ``k``, ``v``, ``attention``, ``mlp``.
        layers: blocks to look into, negative numbers counted from the end; all by default.
        queries: roles or positions whose attention rows to keep; by default every token that is not a patch.
        batch_size: pictures to run at once, where they do not come in batches; by default 8 files, or a whole tensor.
        dtype: dtype to keep floating point values in; by default the model's own.
        device: where to keep them; by default where the model is.
        call: what the model is to be called with beside the pictures.
    """
    options = {"batch_size": batch_size, "dtype": dtype, "device": device, "call": call}
    recordings = list(stream(model, images, what, layers, queries, **options))  # type: ignore[arg-type]
    if not recordings:
        raise UnsupportedInput("there were no pictures to record")
    return join(recordings)


def stream(
    model: nn.Module,
    images: Pictures,
    what: str | Sequence[str] = ("tokens",),
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    *,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: Mapping[str, Any] | None = None,
) -> Iterator[Recording]:
    """Do the same batch by batch, each forgotten before the next: for sets that do not fit."""

    def keep(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=device, dtype=dtype) if dtype or device else tensor.detach().clone()

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidOption(f"dtype is one of torch's floating point ones, such as torch.float16; got {dtype!r}")
    watching = watch(model, what, layers, queries, keep)
    for batch in _batches(watching.found, images, batch_size):
        with watching.hooked(), evaluating(model), torch.no_grad():
            model(to_model(model, batch), **(call or {}))
        yield from (_recording(seen, watching.wanted.layers) for seen in watching.take())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, and every part of it as it was afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def join(recordings: Sequence[Recording]) -> Recording:
    """Put recordings of the same kind together, one after the other."""
    first = recordings[0]
    if len(recordings) == 1:
        return first
    if any(one.layout != first.layout for one in recordings):
        raise UnsupportedInput(
            "pictures of several sizes have grids of several sizes and cannot be kept in one recording; record them "
            "apart, or make them the same size"
        )
    embeddings = [one.embedding for one in recordings if one.embedding is not None]
    layers = {
        name: {layer: torch.cat([getattr(one, name)[layer] for one in recordings]) for layer in getattr(first, name)}
        for name in BY_LAYER
    }
    return Recording(first.layout, first.layers, first.queries, torch.cat(embeddings) if embeddings else None, **layers)


def _recording(seen: Seen, layers: tuple[int, ...]) -> Recording:
    return Recording(seen.layout, layers, seen.queries, seen.embedding, **seen.by_layer)


def _batches(found: Found, data: Any, batch_size: int | None) -> Iterator[Tensor]:
    """Give batches of whatever pictures are; what could not be read is left out, and said."""
    embedding = found.adapter.patch_embedding(found.trunk)
    frames = any(isinstance(part, nn.Conv3d) for part in embedding.modules())
    feed = data if isinstance(data, Batches) else open_batches(data, with_labels=False, frames=frames)
    for piece in feed.batches(found.adapter.preprocessing(found.trunk), batch_size):
        yield piece.images
    if feed.skipped:
        many, (_, reason) = len(feed.skipped), feed.skipped[0]
        said = f"left out what could not be read, {many} of the pictures; the first: {reason}"
        warnings.warn(said, VitrailWarning, stacklevel=2)


def to_model(model: nn.Module, batch: Tensor) -> Tensor:
    """Bring a batch of prepared pictures to where the model is, in its dtype."""
    if not batch.is_floating_point():
        raise UnsupportedInput(
            f"pictures are {batch.dtype}; expected floating point, scaled and normalised as the model was trained"
        )
    weight = next((value for value in model.parameters() if value.is_floating_point()), None)
    return batch if weight is None else batch.to(weight.device, weight.dtype)
