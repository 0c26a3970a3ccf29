"""``evaluate``: how good a trained model is on some data, by the names of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail._distributed import Crew, joined
from vitrail.data.dataset import open_dataset
from vitrail.data.loading.loader import Keep, make_loader
from vitrail.data.sources.base import LABEL
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption
from vitrail.surgery.recording import evaluating
from vitrail.training.config.syntax import read_merge
from vitrail.training.data_warnings import left_out
from vitrail.training.evaluation.pass_ import evaluate as evaluate_model
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.input_size import expected_of, prepares
from vitrail.training.objective.teacher import expected_by
from vitrail.training.run_directory import Labels, load_trained

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def evaluate(
    model: str | Path | nn.Module | tuple[nn.Module, Labels],
    data: Any,
    *,
    labels: Sequence[str] = (),
    merge: str | Mapping[str, Any] | None = None,
    size: int | None = None,
    batch: int = 256,
    device: str | None = None,
    dtype: str = "fp32",
    keep_data: Keep = "auto",
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Callable[[str, int, int], None] | None = None,
    look: int = 256,
    seconds: float = 1.0,
) -> Evaluation:
    """Measure a trained model: accuracy of each head and of all together, calibration, confusion, speed.

    >>> evaluate("runs/pets", "pets-test.parquet", merge={"r": 8}).accuracy["fused"]  # doctest: +SKIP

    Args:
        model: folder of a run or of a model; what ``load_trained`` gives; or a model, whose classes are then those of
            the data.
        data: labelled pictures or arrays, as for training. Classes are found by their names.
        labels: columns of labels, some of those that the model was trained with; by default all of them.
        merge: options of ``vitrail.merge``, or text like ``"r=8"``; ``{"r": 0}`` for none.
        size: height and width to show pictures at; by default the model's own. A net that was trained on crops has seen
            things larger than they are in a whole picture, and is often better on larger ones.
        batch, device, dtype: how to run it; ``bf16`` is autocast.
        keep_data, workers, max_unreadable: how pictures are read, as for training.
        progress: called with what is done, how far it is, and how far it goes.
        look: how many pictures collapse and artifacts are measured on.
        seconds: how long to measure speed for.
    """
    if dtype not in DTYPES:
        raise InvalidOption(f"dtype={dtype!r}; expected one of {', '.join(DTYPES)}")
    if isinstance(merge, str):
        merge = _merging(merge)
    with joined(device) as crew:
        net, known = _loaded(model)
        columns = tuple(labels)
        if known is not None and known.classes and not columns and list(known.classes) != [LABEL]:
            columns = tuple(known.classes)
        classes = None if known is None else _classes(known, columns)
        examples = open_dataset(data, labels=columns, classes=classes, labeled=True)
        expects = (known.preprocessing if known else None) or expected_by(net)
        expects = _sized(expected_of(examples, expects, type(net).__name__), size, net)

        def reading(done: int, total: int) -> None:
            _tell(crew, progress, "reading", done, total)

        count = len(examples)
        feed = make_loader(
            examples, image_size=expects.size[0] if expects.size else 1, device=crew.device,
            rank=crew.rank, world_size=crew.world, keep=keep_data, workers=workers, max_unreadable=max_unreadable,
            progress=reading,
        )  # fmt: skip
        plain = prepares(expects).plain
        shown = "" if size is None else f"pictures are shown at {size} × {size} pixels"
        notes = (*_notes(known, merge), shown, left_out("data", examples))
        try:
            found = evaluate_model(
                net.to(crew.device), feed, known=_several(known), prepare=plain, merge=merge, batch=batch,
                dtype=DTYPES[dtype],
                progress=lambda done: _tell(crew, progress, "evaluating", done * crew.world, count), look=look,
                seconds=seconds,
            )  # fmt: skip
            return replace(found, notes=tuple(text for text in (*notes, *found.notes) if text))
        finally:
            feed.close()


def _loaded(model: str | Path | nn.Module | tuple[nn.Module, Labels]) -> tuple[nn.Module, Labels | None]:
    if isinstance(model, nn.Module):
        return model, None
    return model if isinstance(model, tuple) else load_trained(model)


def _sized(expects: InputSpec, size: int | None, net: nn.Module) -> InputSpec:
    """Say how pictures of another size are prepared; refuse one that the model does not take, before any is read."""
    if size is None:
        return expects
    if expects.is_array:
        raise InvalidOption(f"size={size} is for pictures; arrays are given to a model as they are")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidOption(f"size={size!r}: expected a number of pixels, 1 or more")
    weight = next(net.parameters(), torch.zeros(()))
    try:
        with torch.no_grad(), evaluating(net):
            net(torch.zeros(1, 3, size, size, device=weight.device, dtype=weight.dtype))
    except Exception as error:
        why = " ".join(str(error).split())
        raise InvalidOption(f"size={size}: {type(net).__name__} does not take pictures of this size ({why})") from error
    return replace(expects, size=(size, size))


def _merging(text: str) -> dict[str, Any]:
    """Read what merges from text like ``r=8``."""
    plan = read_merge(text)
    assert plan is not None
    if plan.from_epoch or plan.over_epochs:
        raise InvalidOption("from_epoch and over_epochs are for training; give what merges, like r=8")
    return plan.options


def _notes(known: Labels | None, merge: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Say what is easily taken for granted: which model of a run it is, and that it was trained to be merged."""
    if known is None:
        return ()
    where = f"measured: {known.folder}"
    if not known.classes:
        where += "; it does not say the names of its classes, which are taken to be the data's, in the data's order"
    trained: Mapping[str, Any] = known.trained.get("merge") or {}
    if merge is not None or not trained:
        return (where,)
    return where, f"it was trained with merging (r={trained.get('r')}) and is measured without; merge= says otherwise"


def _classes(known: Labels, columns: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Give the classes that a model knows, by the columns of the data."""
    if not known.classes:
        return None
    if len(columns) == len(known.classes) == 1:
        return {columns[0]: next(iter(known.classes.values()))}
    if strange := [name for name in columns if name not in known.classes]:
        raise InvalidOption(
            f"labels: {strange[0]!r} is none of the columns that {known.folder} was trained with, which are "
            f"{', '.join(known.classes)}"
        )
    return {name: known.classes[name] for name in columns or known.classes}


def _several(known: Labels | None) -> dict[str, tuple[str, ...]] | None:
    """Give everything that a model answers, where that is more than one thing: data may be about some of it."""
    return known.classes if known is not None and len(known.classes) > 1 else None


def _tell(crew: Crew, progress: Callable[[str, int, int], None] | None, stage: str, done: int, total: int) -> None:
    if progress is not None and crew.first:
        progress(stage, min(done, total), total)
