"""``vitrail.inspect``: does a model have artifact tokens, where, since when, what do they hold, and what helps?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vitrail._distributed import ranks
from vitrail.adapters import Found, find
from vitrail.analysis.discovery import Discovery
from vitrail.analysis.result import plain
from vitrail.bench.machine import describe_machine
from vitrail.data.batches import Batches, open_batches
from vitrail.data.sample_images import samples
from vitrail.errors import InvalidOption
from vitrail.report.again import Again
from vitrail.report.closer import Closer, look_closer
from vitrail.report.cure import Trial, try_cure
from vitrail.report.gathering import gather
from vitrail.report.looking import Evidence, Looker
from vitrail.report.report import Report
from vitrail.report.sections import (
    Section,
    attempt,
    attempt_with,
    attention_section,
    discovery_section,
    pca_section,
    probe_sections,
    redundancy_section,
    registers_section,
)
from vitrail.report.shown import Shown, show
from vitrail.report.study import Study
from vitrail.tokens import TokenLayout

Progress = Callable[[str, int, int | None], object]
"""Called with what is being done, how much of it is done, and how much there is (None where nobody knows)."""

MOST_NAMED = 100
LEFT_OUT = {"note": "left out, as asked for"}


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
    """Look for artifact tokens in a model, and say where they are, since when, and what they hold.

    The model runs as it always does, once over the data. Norms of all pictures are counted; what other analyses need
    is kept of a limited number of pictures, spread evenly (at most 600, 1 GiB in half precision on the CPU; see
    :mod:`vitrail.report.looking`), so that memory does not grow with the data. Some pictures are looked at again: a
    few for attention layer by layer and rollout, and, where there are artifacts, up to two hundred for the cure. An
    analysis that cannot be done says so in the report, and the others go on.

    With ``torch.distributed`` initialised, each process looks at its part of the data, and the first one returns the
    report that a single process would have made. The others return None.

    Args:
        model: any supported model; it is put into evaluation mode for the time of it.
        data: a picture file, a folder, several of these or a parquet file; a collection of them; prepared pictures
            (B, C, H, W); or batches of such, each a tensor or (tensor, labels), in the same order at every walk. None
            for the shipped samples.
        batch_size: pictures to run at once, where the data are not batches already.
        limit: most pictures to look at.
        labels: for files, what :func:`~vitrail.data.open_dataset` takes; for a tensor, one whole
            number for each picture.
        probes: whether to fit probes, which takes the longest.
        discovery: whether to look for objects with LOST and TokenCut.
        cure: whether to try test-time registers on the same pictures, where there are artifacts; the model is what
            it was afterwards.
        seed: of splits and draws.
        progress: called as ``progress(what, done, total)``; see :data:`Progress`.
        device: where to run; the model is moved there and back. By default where it is.
        name: what the report calls the model.

    Example:
        >>> report = vitrail.inspect(model, "pictures/")   # doctest: +SKIP
        >>> print(report.verdict)                          # doctest: +SKIP
        >>> report.save("report.html")                     # doctest: +SKIP
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidOption(f"batch_size is the number of pictures to run at once, 1 or more; got {batch_size!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidOption(f"the seed is a whole number; got {seed!r}")
    tell = progress or (lambda what, done, total: None)
    found = find(model)
    source = open_batches(list(samples().values()) if data is None else data, limit=limit, labels=labels)
    with _moved(model, device) as where:
        evidence, error = _look(model, found, source, batch_size, discovery, tell)
        whole = gather(evidence, error)
        if whole is None:
            return None
        asked = {"probes": probes, "discovery": discovery, "cure": cure}
        options = {"batch_size": batch_size, "limit": limit, **asked, "seed": seed}
        study = Study.of(whole, where, seed)
        again = Again(source, found.adapter.preprocessing(found.trunk), batch_size, ())
        sections, shown = _sections(model, study, again, options, tell)
        return _report(whole, study, sections, shown, source, options, describe_model(model, found, name))


def _look(
    model: nn.Module, found: Found, source: Batches, batch_size: int, objects: bool, tell: Progress
) -> tuple[Evidence, Exception | None]:
    """Run the model over this process's part; give what it saw, and the error that ended it."""
    rank, world = ranks()
    total = source.total
    mine = None if total is None else len(range(rank, total, world))
    preprocessing = found.adapter.preprocessing(found.trunk)
    looker = Looker(model, preprocessing, total, objects)
    error: Exception | None = None
    try:
        for piece in source.batches(preprocessing, batch_size, rank, world):
            looker.look(piece)
            tell("looking at pictures", looker.evidence.seen, mine)
    except Exception as problem:  # told to the other processes first, then raised
        error = problem
    looker.evidence.skipped = list(source.skipped)
    return looker.evidence, error


def _report(
    evidence: Evidence,
    study: Study | None,
    sections: dict[str, Section],
    shown: list[Shown],
    source: Batches,
    options: Section,
    model: Section,
) -> Report:
    """Put the report together."""
    norms = evidence.counts.result()
    layout = study.layout if study is not None else next(iter(evidence.queries))
    data = {
        "kind": source.kind,
        "pictures": evidence.seen,
        "labelled": evidence.labelled,
        "fingerprint": f"{evidence.fingerprint:016x}",
        "classes": list(source.class_names) if source.class_names else None,
        "kept": {"places": 0, "features": 0, "objects": 0},
    }
    problems = _problems(evidence, norms.to_dict(), study)
    if study is not None:
        kept = {"places": len(study.pictures), "features": len(study.featured), "objects": len(study.objects)}
        data["kept"] = kept
    return Report(
        model=model,
        data=data,
        layout=_describe_layout(layout),
        norms=norms.to_dict(),
        problems=problems,
        settings=plain(options),
        versions=plain(describe_machine(torch.device(model["device"] or "cpu"))),
        pictures=shown,
        **sections,
    )


def _sections(
    model: nn.Module, study: Study | None, again: Again, options: Section, tell: Progress
) -> tuple[dict[str, Section], list[Shown]]:
    """Run the analyses on what was seen, and look again at some pictures."""
    names = ("redundancy", "attention", "pca", "probes", "discovery", "registers", "cure")
    if study is None:
        return {name: {"note": "no picture has numbers that are all finite"} for name in names}, []
    steps = iter(range(1, len(names) + 1))

    def step(name: str) -> None:
        tell(f"analysing {name}", next(steps), len(names))

    step("places")
    found = {"redundancy": attempt(lambda: redundancy_section(study))}
    step("attention")
    found["attention"] = attempt(lambda: attention_section(study))
    closer: dict[int, Closer] = {}
    if study.layout.num_special:
        found["attention"]["closer"], closer = attempt_with(lambda: look_closer(model, study, again), closer)
    step("components")
    found["pca"], basis = pca_section(study)
    step("objects")
    boxes: dict[str, dict[int, Discovery]] = {}
    found["discovery"] = dict(LEFT_OUT)
    if options["discovery"]:
        found["discovery"], boxes = discovery_section(study)
    step("probes")
    found["probes"], classes = dict(LEFT_OUT), None
    if options["probes"]:
        found["probes"], classes = probe_sections(study)
    step("registers")
    found["registers"] = attempt(lambda: registers_section(study, classes))
    step("cures")
    cured: Trial | None = None
    found["cure"] = dict(LEFT_OUT)
    if options["cure"]:
        found["cure"], cured = attempt_with(lambda: try_cure(model, study, again, tell), cured)
    return found, show(study, boxes, basis, again.feed.class_names, closer, cured)


def _problems(evidence: Evidence, norms: Section, study: Study | None) -> Section:
    names = {index: picture.name for index, picture in evidence.pictures.items()} | evidence.not_finite
    places = [
        {**place, "name": names.get(place["picture"], f"picture {place['picture']}")} for place in norms["not_finite"]
    ]
    notes = sorted(evidence.notes)
    if study is not None and study.other_sizes:
        notes.append(
            f"{study.other_sizes} pictures have another grid than the first one; norms count them, the rest does not"
        )
    return {
        "skipped": [{"name": name, "reason": reason} for name, reason in evidence.skipped[:MOST_NAMED]],
        "num_skipped": len(evidence.skipped),
        "not_finite": places,
        "num_not_finite_tokens": norms["num_not_finite"],
        "num_not_finite_pictures": evidence.num_not_finite,
        "notes": notes,
    }


def describe_model(model: nn.Module, found: Found, name: str | None) -> Section:
    """Say which model it is."""
    weight = next(iter(model.parameters()), None)
    heads, width = found.block_adapters[0].head_shape(found.blocks[0])
    return {
        "name": name or _name_of(found.trunk),
        "class": f"{type(found.trunk).__module__.partition('.')[0]} {type(found.trunk).__name__}",
        "layers": len(found.blocks),
        "heads": heads,
        "head_width": width,
        "parameters": sum(value.numel() for value in model.parameters()),
        "dtype": None if weight is None else str(weight.dtype).removeprefix("torch."),
        "device": None if weight is None else str(weight.device),
    }


def _name_of(trunk: nn.Module) -> str:
    """Find what the library calls a model."""
    told: Any = getattr(trunk, "pretrained_cfg", None)
    if isinstance(told, dict) and told.get("architecture"):
        return str(told["architecture"])
    return str(getattr(getattr(trunk, "config", None), "_name_or_path", "") or type(trunk).__name__)


def _describe_layout(layout: TokenLayout) -> Section:
    return {
        "special": [{"role": span.role.value, "name": span.name, "count": span.count} for span in layout.special],
        "grid": list(layout.grid),
        "num_tokens": layout.num_tokens,
    }


@contextmanager
def _moved(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Have a model on a device, and where it was afterwards."""
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
