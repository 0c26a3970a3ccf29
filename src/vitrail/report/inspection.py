"""``vitrail.inspect``: artifact tokens of a model, where and from which layer on, what they encode, what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail._arguments import checked
from vitrail._checks import is_int
from vitrail._distributed import rank_and_world_size
from vitrail.adapters import Found, find
from vitrail.analysis.result import plain
from vitrail.bench.machine import describe_machine
from vitrail.data.batches import Batches, open_batches
from vitrail.data.sample_files import samples
from vitrail.errors import InvalidOption
from vitrail.report import sections
from vitrail.report.collect import Collected, Collector, gather
from vitrail.report.context import Context, Progress
from vitrail.report.report import Report
from vitrail.report.sections.base import TURNED_OFF, Values, attempt
from vitrail.surgery.recording import input_axes

MAX_NAMED = 100
"""Most skipped images that are listed by name."""


@checked
def inspect(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 8,
    limit: int | None = None,
    labels: Any = None,
    probes: bool = True,
    discovery: bool = True,
    cure: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> Report | None:
    """Find artifact tokens in a model: whether there are any, where, from which layer on, and what they encode.

    The model runs unchanged, once over the data. Norms of all images are counted; features are kept for at most 600
    images and 1 GiB on the CPU (see :mod:`vitrail.report.collect`), so memory does not grow with the data. Some images
    run a second time: a few for attention layer by layer and, if there are artifacts, up to two hundred for test-time
    registers. A section that cannot be computed has a note in the report, and the others go on.

    With ``torch.distributed`` initialized, each rank runs its part of the data, and rank 0 returns the report of all.
    The other ranks return None.

    Args:
        model: any supported model; it is in evaluation mode during the inspection.
        data: an image file, a directory, several of these, or a parquet file; a dataset of them; preprocessed images
            (B, C, H, W); or batches of those, each a tensor or (tensor, labels), in the same order each time. None for
            the samples of the package.
        batch_size: images per batch, unless the data is batches.
        limit: maximum number of images.
        labels: label column of a dataset, see :func:`~vitrail.data.open_dataset`; for a tensor, one integer per image.
        probes: whether to fit probes, which takes the longest.
        discovery: whether to run object discovery with LOST and TokenCut.
        cure: whether to try test-time registers if there are artifacts; the model is unchanged afterwards.
        seed: seed of splits and draws.
        progress: called as ``progress(stage, done, total)``; the total is None if unknown.
        device: device to run on; the model is moved there and back. The model's own device by default.
        name: name of the model in the report.

    Example:
        >>> report = vitrail.inspect(model, "images/")   # doctest: +SKIP
        >>> print(report.verdict)                        # doctest: +SKIP
        >>> report.save("report.html")                   # doctest: +SKIP
    """
    if not is_int(batch_size, 1) or not is_int(seed):
        raise InvalidOption(f"batch_size must be 1 or more, and seed an integer; got {batch_size!r} and {seed!r}")
    report_progress = progress or (lambda stage, done, total: None)
    found = find(model)
    spec = found.adapter.input_spec(found.trunk)
    given = list(samples(spec.modality).values()) if data is None else data
    source = open_batches(given, limit=limit, labels=labels, axes=input_axes(found))
    settings = {"batch_size": batch_size, "limit": limit, "probes": probes, "discovery": discovery, "cure": cure}
    with _moved(model, device) as where:
        collector = Collector(model, spec, source.total, objects=discovery)
        error = _collect(collector, source, batch_size, report_progress)
        collected = gather(collector.collected, error)
        if collected is None:
            return None
        run = {"data": source, "spec": spec, "batch_size": batch_size, "device": where}
        context = Context.create(collected, model, **run, seed=seed, progress=report_progress)
        values = _compute_sections(context, settings)
        description = _describe_model(model, found, name)
    return _build_report(collected, context, values, source, {**settings, "seed": seed}, description, spec.modality)


def _collect(collector: Collector, data: Batches, batch_size: int, progress: Progress) -> Exception | None:
    """Run the model over the data of this rank; return the error that ended it."""
    rank, world = rank_and_world_size()
    total = None if data.total is None else len(range(rank, data.total, world))
    try:
        for batch in data.batches(collector.spec, batch_size, rank, world):
            collector.add(batch)
            progress("running images", collector.collected.seen, total)
    except Exception as error:  # reported to the other ranks first, then raised
        return error
    finally:
        collector.collected.skipped = list(data.skipped)
    return None


def _compute_sections(context: Context | None, settings: Values) -> dict[str, Values]:
    keys = sections.section_keys()
    if context is None:
        return {key: {"note": "no image has only finite values"} for key in keys}
    for section in sections.SECTIONS:
        if section.compute is None:
            continue
        context.progress("analyzing", len(context.sections), len(keys))
        if section.option is not None and not settings[section.option]:
            context.sections[section.key] = {"note": TURNED_OFF}
        else:
            context.sections[section.key] = attempt(partial(section.compute, context))
    context.progress("analyzing", len(keys), len(keys))
    return context.sections


def _build_report(
    collected: Collected,
    context: Context | None,
    values: dict[str, Values],
    source: Batches,
    settings: Values,
    model: Values,
    modality: str,
) -> Report:
    norms = collected.counts.result().to_dict()
    layout = next(iter(collected.queries)) if context is None else context.layout
    many = (0, 0, 0) if context is None else (len(context.images), len(context.featured), len(context.with_objects))
    return Report(
        model=model,
        data={
            "kind": source.kind,
            "medium": modality,
            "images": collected.seen,
            "labelled": collected.labelled,
            "fingerprint": f"{collected.fingerprint:016x}",
            "classes": list(source.class_names) if source.class_names else None,
            "kept": dict(zip(("places", "features", "objects"), many, strict=True)),
        },
        layout={
            "special": [{"role": span.role.value, "name": span.name, "count": span.count} for span in layout.special],
            "grid": list(layout.grid),
            "num_tokens": layout.num_tokens,
        },
        norms=norms,
        sections=values,
        problems=_problems(collected, norms, 0 if context is None else context.other_sizes),
        settings=plain(settings),
        versions=plain(describe_machine(torch.device(model["device"] or "cpu"))),
        images=[] if context is None else context.shown,
    )


def _problems(collected: Collected, norms: Values, other_sizes: int) -> Values:
    names = {index: image.name for index, image in collected.images.items()} | collected.not_finite
    places = [{**place, "name": names.get(place["image"], f"image {place['image']}")} for place in norms["not_finite"]]
    notes = sorted(collected.notes)
    if other_sizes:
        notes.append(f"{other_sizes} images have another patch grid than the first one; only norms include them")
    return {
        "skipped": [{"name": name, "reason": reason} for name, reason in collected.skipped[:MAX_NAMED]],
        "num_skipped": len(collected.skipped),
        "not_finite": places,
        "num_not_finite_tokens": norms["num_not_finite"],
        "num_not_finite_images": collected.num_not_finite,
        "notes": notes,
    }


def _describe_model(model: nn.Module, found: Found, name: str | None) -> Values:
    weight = next(iter(model.parameters()), None)
    heads, width = found.block_adapters[0].head_shape(found.blocks[0])
    trunk: Any = found.trunk
    config = getattr(trunk, "pretrained_cfg", None)
    library_name = config.get("architecture") if isinstance(config, dict) else None
    library_name = library_name or getattr(getattr(trunk, "config", None), "_name_or_path", None)
    return {
        "name": name or str(library_name or type(trunk).__name__),
        "class": f"{type(trunk).__module__.partition('.')[0]} {type(trunk).__name__}",
        "layers": len(found.blocks),
        "heads": heads,
        "head_width": width,
        "parameters": sum(value.numel() for value in model.parameters()),
        "dtype": None if weight is None else str(weight.dtype).removeprefix("torch."),
        "device": None if weight is None else str(weight.device),
    }


@contextmanager
def _moved(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Move a model to a device, and back on exit."""
    weight = next(iter(model.parameters()), None)
    home = torch.device("cpu") if weight is None else weight.device
    if device is None or torch.device(device) == home:
        yield home
        return
    model.to(device)
    try:
        yield torch.device(device)
    finally:
        model.to(home)
