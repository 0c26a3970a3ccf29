"""Resuming a run: its saved config, its newest complete checkpoint, and checks that the data is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.data.dataset import fingerprint_difference
from vitrail.errors import InvalidOption, TrainingError
from vitrail.training.config import OPTIONS, Config, read_yaml
from vitrail.training.loop import Loop
from vitrail.training.run_directory import SETTINGS
from vitrail.training.setup import Setup


def resume_config(given: dict[str, Any]) -> Config:
    """Return the config of the run to resume; raise if an option that affects the result changes."""
    folder = Config.from_dict({"data": ".", **given}).folder
    if not (folder / SETTINGS).is_file():
        raise TrainingError(
            f"{folder} has no run to resume; leave out resume (--resume) to start one, or give its directory, out= (-o)"
        )
    saved = read_yaml(folder / SETTINGS)
    before, now = (Config.from_dict(values).to_dict() for values in (saved, {**saved, **given}))
    for name in given:
        if not OPTIONS[name].resumable and now[name] != before[name]:
            raise InvalidOption(
                f"{name}={now[name]!r}, but the run in {folder} was started with {before[name]!r}. Leave it out to "
                f"resume, or start another run, with model={folder} to fine-tune its model"
            )
    values = {**saved, "device": None, **{name: value for name, value in given.items() if OPTIONS[name].resumable}}
    for name in ("data", "validation"):
        if isinstance(values.get(name), str) and values[name].startswith("<"):
            raise InvalidOption(f"{name}: the run was started with a dataset from Python; give it again")
    return Config.from_dict({**values, "out": str(folder)})


def load_checkpoint(loop: Loop, count: int) -> int:
    """Load the newest complete checkpoint; return its step."""
    setup = loop.setup
    world, checkpoints = setup.world, setup.checkpoints
    step, skipped = world.run(checkpoints.newest)
    if step > loop.total:
        raise TrainingError(
            f"{checkpoints.path(step)} belongs to another run: this one has {loop.total} steps. Two runs have written "
            "to one directory; start over in another one"
        )
    meta = checkpoints.meta(step)
    for text in skipped:
        setup.note(f"{text[0].upper()}{text[1:]}; resuming from step {step} instead.")
    world.run(lambda: _check_data(setup, meta, count))
    world.run(lambda: checkpoints.load(step, loop.tensors()))
    loop.meter.restore(meta["meter"])
    loop.best, loop.seconds = meta["best"], meta["seconds"]
    before, now = meta["processes"], world.world_size
    if before != now:
        batch = setup.config.batch_size or 0
        setup.note(
            f"The world size changed from {before} ({batch // before} images per rank) to {now} ({batch // now}). "
            "Batches, augmentation and schedule stay the same; dropout, drop path and rounding differ."
        )
    return step


def _check_data(setup: Setup, meta: Mapping[str, Any], count: int) -> None:
    """Raise if the data is not the one that the run was started with."""
    if meta["examples"] != count or {k: tuple(v) for k, v in meta["classes"].items()} != setup.classes:
        before, now = ([name for names in each.values() for name in names] for each in (meta["classes"], setup.classes))
        new = [name for name in now if name not in before]
        raise TrainingError(
            f"data: the run was started with {meta['examples']} images of {len(before)} classes; got {count} of "
            f"{len(now)}{f', among them {new[0]!r}' if new else ''}. Resume with the same data"
        )
    differs = fingerprint_difference(meta["data"], setup.data, setup.classes) if "data" in meta else None
    if differs is not None:
        raise TrainingError(
            f"data: {differs}. Resume with the same data; for other data start another run, with "
            f"model={setup.config.folder} to fine-tune its model"
        )
