"""Going on with a run: what it was started with, which checkpoint is good, and what is different now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.data.dataset import fingerprint_difference
from vitrail.errors import InvalidOption, TrainingError
from vitrail.training.config.config import Config, read_yaml
from vitrail.training.log import Event
from vitrail.training.loop import Loop
from vitrail.training.parts import Parts
from vitrail.training.run_directory import SETTINGS

FREE = (
    *("device", "workers", "shard", "keep", "log_every", "evaluate_every", "save_every", "compile", "keep_data"),
    *("graphs", "tensorboard", "out", "data", "validation", "accumulate", "max_unreadable", "teacher"),
)
"""Fields that may change when a run is resumed: they decide where and how, not what."""


def resumed(given: dict[str, Any]) -> Config:
    """Read what a run was started with, and refuse to go on with something else."""
    folder = Config.from_dict({"data": ".", **given}).folder
    if not (folder / SETTINGS).is_file():
        raise TrainingError(
            f"{folder} holds no run to resume; leave resume (--resume) out to start one, or name its folder, out= (-o)"
        )
    saved = read_yaml(folder / SETTINGS)
    fresh = Config.from_dict({"data": saved.get("data"), **saved})
    for name, value in Config.from_dict({**saved, **given}).to_dict().items():
        before = fresh.to_dict()[name]
        if name in given and name not in FREE and value != before:
            raise InvalidOption(
                f"{name}={value!r}, but the run in {folder} was started with {before!r}. Leave it out to resume; or "
                f"start another run, with model={folder} to begin from its weights"
            )
    merged = {**saved, **{name: value for name, value in given.items() if name in FREE}}
    if "device" not in given:
        merged["device"] = None  # where it runs now
    for name in ("data", "validation"):
        if isinstance(merged.get(name), str) and merged[name].startswith("<"):
            raise InvalidOption(f"{name}: the run was started with a data set from Python; give it again")
    return Config.from_dict({**merged, "out": str(folder)})


def go_on(loop: Loop, count: int) -> int:
    """Load the newest complete checkpoint, and say what is different now."""
    parts = loop.parts
    step, passed = parts.crew.together(parts.checkpoints.newest)
    if step > loop.total:
        raise TrainingError(
            f"{parts.checkpoints.path(step)} is of another run: this one has {loop.total} steps. Two runs have written "
            "to one folder; begin anew in another"
        )
    meta = parts.checkpoints.meta(step)
    for text in passed:
        parts.tell(Event("note", text=f"{text[0].upper()}{text[1:]}; going on from step {step} instead."))
    parts.crew.together(lambda: _check_data(parts, meta, count))
    parts.crew.together(lambda: parts.checkpoints.load(step, loop.tensors()))
    loop.meter.restore(meta["meter"])
    loop.best, loop.seconds = meta["best"], meta["seconds"]
    before, now = meta["processes"], parts.crew.world
    if before != now:
        batch = parts.config.batch_size or 0
        parts.tell(
            Event(
                "note",
                text=f"The run had {before} {processes(before)} with {batch // before} pictures each, and now has "
                f"{now} with {batch // now}. Batches, augmentation and schedule stay the same; dropout, drop path and "
                "rounding differ.",
            )
        )
    return step


def _check_data(parts: Parts, meta: Mapping[str, Any], count: int) -> None:
    """Refuse other data than the run was started with, as far as its checkpoint tells."""
    if meta["examples"] != count or {k: tuple(v) for k, v in meta["classes"].items()} != parts.classes:
        before, now = ([name for names in told.values() for name in names] for told in (meta["classes"], parts.classes))
        other = [name for name in now if name not in before]
        raise TrainingError(
            f"data: the run was started with {meta['examples']} pictures of {len(before)} classes, and now there are "
            f"{count} of {len(now)}{f', {other[0]!r} among them' if other else ''}; the same data is needed"
        )
    differs = fingerprint_difference(meta["data"], parts.data, parts.classes) if "data" in meta else None
    if differs is not None:
        raise TrainingError(
            f"data: {differs}. resume goes on with the data that the run was started with; for other data start "
            f"another run, with model={parts.config.folder} to begin from its weights"
        )


def processes(count: int) -> str:
    """Give the word for so many processes."""
    return "process" if count == 1 else "processes"
