"""Measuring how good a model is, merged or not, on one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import head_outputs
from vitrail.errors import InvalidOption, NotApplied, UnsupportedInput
from vitrail.surgery import Merging
from vitrail.surgery import merge as apply_merge
from vitrail.surgery.recording import evaluating
from vitrail.training.evaluation.counts import counts_for
from vitrail.training.evaluation.outputs import answer
from vitrail.training.evaluation.result import Evaluation, Looked, autocast, look_at, throughput

__all__ = ["Evaluation", "evaluate"]

Prepare = Callable[[Tensor], Tensor]

TIMED_ON_CPU = 32
"""Most pictures in a batch that is timed on a CPU: more are no faster there, and take long."""


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    known: Mapping[str, Sequence[str]] | None = None,
    prepare: Prepare | None = None,
    merge: Mapping[str, Any] | None = None,
    batch: int = 256,
    dtype: torch.dtype | None = None,
    look: int = 256,
    seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Measure a model on labelled pictures; afterwards it is as it was: its mode, its merging.

    Where torch.distributed is up, every process brings its part of the pictures, and all get the sum.

    Args:
        model: any classifier, where it is; merged or not.
        data: a feed, whose ``sweep`` gives every picture once, or batches of (pictures, labels).
        classes: names of the classes by column of labels; a feed knows them.
        known: the same for everything that the model answers, where the data has labels for some of it.
        prepare: makes what a feed gives, and whole-number pictures, what the model expects (``Augment.plain``);
            floating point ones that come in batches are taken as prepared.
        merge: options of :func:`vitrail.merge`, instead of the merging that the model has, if any; ``{"r": 0}`` for
            none. None takes the model as it is.
        batch: pictures at once, of a feed.
        dtype: precision to compute in (autocast); by default the model's own.
        look: pictures whose tokens are looked at, for ``collapse`` and ``outliers``; 0 for none.
        seconds: how long to time the model; 0 for not at all.
        progress: called with the number of pictures that are done.
    """
    names = classes if classes is not None else getattr(data, "classes", None)
    if names is None:
        raise InvalidOption("batches of pictures and labels need classes: {'label': ['cat', 'dog']}")
    weight = next(model.parameters())
    counts = counts_for(model, names, weight.device, known)
    kept: list[Tensor] = []
    with ExitStack() as stack:
        settings = stack.enter_context(merged_as(model, merge))
        stack.enter_context(evaluating(model))
        with head_outputs(model) as heard:
            for images, labels in batches(data, batch, prepare, weight.device):
                images = images if dtype is not None else images.to(weight.dtype)
                with torch.no_grad(), autocast(weight.device, dtype):
                    output = answer(model, images)
                counts.add(output, labels, heard)
                if not kept or sum(map(len, kept)) < look:
                    kept.append(images)
                if progress is not None:
                    progress(counts.seen)
        counts.reduce()
        looked = look_at(model, torch.cat(kept)[:look]) if look and kept else Looked()
        timed = kept[0][: None if weight.is_cuda else TIMED_ON_CPU] if kept else weight[:0]
        speed = throughput(model, timed, seconds, dtype) if seconds > 0 and kept else None
    return Evaluation(
        **counts.results(),
        collapse=looked.collapse,
        outliers=looked.outliers,
        images_per_s=speed,
        batch=len(timed),
        device=str(weight.device),
        dtype=str(dtype or weight.dtype).removeprefix("torch."),
        merge=settings,
        notes=(*counts.notes, *looked.notes),
        roles=looked.roles,
        norms=looked.norms,
    )


@contextmanager
def merged_as(model: nn.Module, merge: Mapping[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """Have a model merged by some settings, instead of those that it has; give the settings in place.

    Handles of the merging that it has stay good. None leaves the model as it is.
    """
    try:
        present = Merging.of(model)
    except NotApplied:
        present = None
    if merge is None:
        yield None if present is None else present.config
        return
    with ExitStack() as stack:
        if present is not None:
            stack.enter_context(present.suspended())
        yield stack.enter_context(apply_merge(model, **merge)).config


def batches(data: Any, batch: int, prepare: Prepare | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over a feed, or over batches of (pictures, labels): prepared pictures and labels (B, T) on the device."""
    if batch < 1:
        raise InvalidOption(f"batch is 1 or more pictures; got {batch}")
    if not hasattr(data, "sweep") and not isinstance(data, Iterable):
        raise UnsupportedInput(f"expected a feed, or batches of (pictures, labels); got {type(data).__name__}")
    fed = hasattr(data, "sweep")
    for images, labels, *_ in data.sweep(batch) if fed else data:
        x = images.to(device, non_blocking=True)
        if not x.is_floating_point() or (fed and prepare is not None):
            if prepare is None:
                raise InvalidOption(f"pictures are {x.dtype}; say how they are prepared for the model (prepare)")
            x = prepare(x)
        yield x, labels.to(device, non_blocking=True).reshape(len(labels), -1)
