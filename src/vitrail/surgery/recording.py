"""``vitrail.record``: record the activations of a model while it runs as usual."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import as_device, shown
from vitrail._wording import counted
from vitrail.adapters import Found, image_model
from vitrail.data.batches import Batches, open_batches
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailError, VitrailWarning
from vitrail.runtime.checks import refuse_packed
from vitrail.surgery.hooks import Recording, watch

Images = Any
"""Images in any form that :func:`~vitrail.data.batches.open_batches` takes: a file, a directory, several files, a
parquet file, a dataset; preprocessed images (B, C, H, W), or videos (B, C, T, H, W); or batches of these, each a tensor
or a tuple that starts with one."""


@checked
def record(
    model: nn.Module,
    images: Images,
    what: str | Sequence[str] = ("tokens",),
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    *,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: Mapping[str, Any] | None = None,
) -> Recording:
    """Run a model on images and return the requested activations.

    The model runs in evaluation mode and is otherwise unchanged. In a merged model, each original position shows the
    token that it was merged into.

    Args:
        model: a supported model.
        images: images as files or tensors; see :data:`Images`. Files that cannot be read are skipped with a warning.
        what: some of ``embedding``, ``entry``, ``tokens``, ``norms``, ``q``, ``k``, ``v``, ``attention``, ``mlp``.
        layers: blocks to record; negative numbers count from the end; by default all.
        queries: roles or positions of the tokens whose attention rows to record, or ``"all"``; by default all special
            tokens. Rows of a class-attention stage (CaiT) are recorded beside them, as ``class_attention``.
        batch_size: batch size; by default 8 files, or the whole tensor.
        dtype: dtype of the recorded tensors; by default the model's.
        device: device of the recorded tensors; by default the model's.
        call: further keyword arguments of the model.
    """
    options = {"batch_size": batch_size, "dtype": dtype, "device": device, "call": call}
    recordings = list(stream(model, images, what, layers, queries, **options))  # type: ignore[arg-type]
    if not recordings:
        raise UnsupportedInput("there are no images to record")
    return join(recordings)


@checked
def stream(
    model: nn.Module,
    images: Images,
    what: str | Sequence[str] = ("tokens",),
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    *,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: Mapping[str, Any] | None = None,
) -> Iterator[Recording]:
    """Yield a recording of each batch, for datasets that do not fit in memory. Arguments as for `record`."""

    _check_call(model, call)
    place = None if device is None else as_device("device", device)
    if call is not None and not (isinstance(call, Mapping) and all(isinstance(name, str) for name in call)):
        raise InvalidOption(f"call={shown(call)}: expected keyword arguments of the model, a mapping with names")

    def keep(tensor: Tensor) -> Tensor:
        changes = dtype is not None or place is not None
        return tensor.detach().to(device=place, dtype=dtype) if changes else tensor.detach().clone()

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidOption(f"dtype must be a floating point dtype such as torch.float16; got {dtype!r}")
    recorder = watch(model, what, layers, queries, keep)
    whole = image_model(model) if call is None else model
    for batch in read_batches(recorder.found, images, batch_size):
        with recorder.hooked(), evaluating(model), torch.no_grad(), taking(recorder.found, batch):
            whole(to_model(model, batch), **(call or {}))
        yield from recorder.take()


def _check_call(model: nn.Module, call: Mapping[str, Any] | None) -> None:
    """Raise for keyword arguments that a model's ``forward`` does not take."""
    parameters = inspect.signature(model.forward).parameters if call and isinstance(model, nn.Module) else {}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    unknown = [] if takes_any or not isinstance(call, Mapping) else [name for name in call if name not in parameters]
    if unknown:
        raise InvalidOption(
            f"call: {type(model).__name__} takes no {shown(unknown[0])}; expected some of {', '.join(parameters)}"
        )


def join(recordings: Sequence[Recording]) -> Recording:
    """Concatenate recordings of the same activations."""
    first = recordings[0]
    if len(recordings) == 1:
        return first
    if any(one.layout != first.layout for one in recordings):
        raise UnsupportedInput(
            "images of several sizes have different patch grids and cannot be in one recording; record them separately "
            "or resize them"
        )
    embeddings = [one.embedding for one in recordings if one.embedding is not None]
    entries = [one.entry for one in recordings if one.entry is not None]
    layers = {
        name: {layer: torch.cat([one.by_layer[name][layer] for one in recordings]) for layer in by_layer}
        for name, by_layer in first.by_layer.items()
    }
    gathered = {layer: torch.cat([one.class_attention[layer] for one in recordings]) for layer in first.class_attention}
    return Recording(
        first.layout,
        first.layers,
        first.queries,
        torch.cat(embeddings) if embeddings else None,
        torch.cat(entries) if entries else None,
        **layers,
        class_attention=gathered,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside a ``with`` block, and restore the mode of every module afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def to_model(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a batch on the model's device and in its dtype."""
    if not batch.is_floating_point():
        raise UnsupportedInput(f"images must be floating point, preprocessed as in training; got {batch.dtype}")
    weight = next((value for value in model.parameters() if value.is_floating_point()), None)
    return batch if weight is None else batch.to(weight.device, weight.dtype)


@contextmanager
def taking(found: Found, batch: Tensor) -> Iterator[None]:
    """Raise ``UnsupportedInput`` for what a library raises inside a ``with`` block, if the inputs have another shape.

    Libraries refuse inputs of a wrong size by errors of their own, or of torch.
    """
    try:
        yield
    except VitrailError:
        raise
    except (AssertionError, ValueError, RuntimeError, TypeError, IndexError) as error:
        own = _own_shape(found)
        if isinstance(error, torch.OutOfMemoryError) or tuple(batch.shape[1:]) == own:
            raise
        why = " ".join(str(error).split())
        raise UnsupportedInput(
            f"this model does not take inputs of shape {tuple(batch.shape[1:])} ({why:.200}); it takes {own}. Resize "
            "the images, or pass files, which are resized"
        ) from error


def _own_shape(found: Found) -> tuple[int, ...]:
    """Return the shape of one input of a model."""
    spec = found.adapter.input_spec(found.trunk)
    if spec.axes:
        return spec.shape
    convolutions = (
        part for part in found.adapter.patch_embedding(found.trunk).modules() if isinstance(part, nn.Conv2d | nn.Conv3d)
    )
    first = next(convolutions, None)
    return (len(spec.mean) if first is None else first.in_channels, *spec.size)


def check_finite(values: Tensor, what: str) -> None:
    """Raise ``UnsupportedInput`` if some values (images, ...) are NaN or infinite."""
    broken = (~values.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise UnsupportedInput(
            f"{what} of {counted(len(broken), 'image')} of {len(values)} in a batch are NaN or infinite, the first of "
            f"image {broken[0]} (counted from 0); leave these images out, or check the model's weights and dtype"
        )


def input_axes(found: Found) -> str:
    """Return the order of the axes of one preprocessed input."""
    videos = any(isinstance(part, nn.Conv3d) for part in found.adapter.patch_embedding(found.trunk).modules())
    spec = found.adapter.input_spec(found.trunk)
    return spec.axes or ("CTHW" if videos else MODALITIES[spec.modality].axes or "CHW")


def read_batches(found: Found, data: Any, batch_size: int | None) -> Iterator[Tensor]:
    """Yield batches of images that a model takes; warn about files that could not be read."""
    refuse_packed(found, "reading images")
    batches = data if isinstance(data, Batches) else open_batches(data, with_labels=False, axes=input_axes(found))
    for piece in batches.batches(found.adapter.input_spec(found.trunk), batch_size):
        yield piece.images
    if batches.skipped:
        many, (_, reason) = len(batches.skipped), batches.skipped[0]
        warnings.warn(
            f"skipped {counted(many, 'image')} that could not be read; the first: {reason}",
            VitrailWarning,
            stacklevel=2,
        )
