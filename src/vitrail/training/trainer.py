"""``train``: from a config to a finished run. Everything is checked before anything is written."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from vitrail._checks import check_callable, check_flag, is_number, shown
from vitrail._distributed import TIMEOUT, World, distributed
from vitrail.data.dataset import fingerprint_difference
from vitrail.errors import InvalidOption, TrainingError
from vitrail.training.config import OPTIONS, Config, fixed_options, read_yaml
from vitrail.training.data import data_notes, open_data
from vitrail.training.log import Event, OnEvent, tensorboard_writer
from vitrail.training.loop import Loop
from vitrail.training.model import Models, make_models
from vitrail.training.run_directory import SETTINGS, Run, check_free, claim, recover, write_text

VALUES = {"regression": "values", "depth": "depth maps"}
"""What is said of labels that are no classes."""

SUFFIXES = {"multilabel": ", several at once", "dense": " of pixels"}
"""What is said of classes that are not one for each image."""


def train(
    config: Config | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    seconds: float | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> Run:
    """Train a model.

    >>> run = train(data="photos", model="vit_tiny_patch16", preset="tiny")  # doctest: +SKIP
    >>> run.evaluation.accuracy["fused"]  # doctest: +SKIP

    Under ``torchrun`` all ranks train together, with the same result as one.

    Args:
        config: the training configuration; alternatively its options by name.
        resume: resume the run in ``out``, with its saved config. Options that affect the result cannot change.
        overwrite: replace the run in ``out``.
        seconds: time limit: stop with a checkpoint (`OutOfTime`) at the next log line or end of an epoch.
        on_event: called with each `Event` on rank 0.
        options: options of `Config`; these take precedence over ``config``.
    """
    if "tell" in options:
        warnings.warn("train(tell=…) is deprecated; use on_event", DeprecationWarning, stacklevel=2)
        on_event = options.pop("tell")
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise InvalidOption(f"seconds={shown(seconds)}: expected a number above 0, or None for no time limit")
    until = math.inf if seconds is None else time.monotonic() + seconds
    if resume and overwrite:
        raise InvalidOption("resume continues a run and overwrite replaces it; give one of them")
    for name, value in (("resume", resume), ("overwrite", overwrite)):
        check_flag(name, value)
    check_callable("on_event", on_event)
    if config is not None and not isinstance(config, Config):
        raise InvalidOption(
            f"config={shown(config)}: expected a vitrail.training.Config; give options by name, data= first, or those "
            "of a YAML file by Config.from_yaml"
        )
    if config is not None:
        default = Config(data=config.data)
        changed = {name: getattr(config, name) for name in OPTIONS if getattr(config, name) != getattr(default, name)}
        options = {"data": config.data, **changed, **options}
    minutes = options.get("patience")
    patience = timedelta(minutes=minutes) if is_number(minutes) and 0 < minutes <= 10_000 else TIMEOUT
    with distributed(options.get("device"), patience) as world, ExitStack() as stack:
        requested = world.run(lambda: _resume_config(options) if resume else Config.from_dict(options))
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        listener = on_event if on_event and world.is_main else lambda event: None
        loop, start = _prepare(requested, world, resume, overwrite, listener, stack)
        return loop.run(start, until)


def _prepare(
    requested: Config, world: World, resume: bool, overwrite: bool, on_event: OnEvent, stack: ExitStack
) -> tuple[Loop, int]:
    """Check everything, then create the run directory; return the loop and its first step.

    The stack unlocks the run directory and closes log and data loaders.
    """
    requested, dataset, held = world.run(lambda: open_data(requested))
    config = requested.resolved(len(dataset), cuda=world.device.type == "cuda")
    folder = config.folder

    def check() -> Models:
        batch, pairs = config.batch_size or 0, 2 if config.mixup or config.cutmix else 1
        if batch > len(dataset):
            raise InvalidOption(f"batch_size={batch} exceeds the {len(dataset)} training images; reduce it")
        if batch % (divisor := world.world_size * config.accumulate * pairs):
            raise InvalidOption(
                f"batch_size={batch} is not divisible by {divisor}: world size {world.world_size} × accumulate "
                f"{config.accumulate}{' × 2, as images are mixed in pairs' if pairs == 2 else ''}"
            )
        if config.tensorboard:
            tensorboard_writer()
        if config.graphs and (world.world_size > 1 or world.device.type != "cuda"):
            raise InvalidOption(
                f"graphs=True needs a single rank on CUDA; got {world.world_size} on {world.device.type}"
            )
        if not resume:
            recover(folder)
            check_free(folder, overwrite=overwrite)
        return make_models(config, dataset.classes, world, dataset.tensor_spec, dataset.scaled_targets)

    models = world.run(check)
    size = models.preprocessing.size
    if dataset.tensor_spec is None:
        config = replace(config, image_size=size[0])
        config = replace(config, side=config.side or config.image_size)
    elif dataset.modality == "array":  # its size is that of the data
        config = replace(config, image_size=None)
    loop = world.run(lambda: Loop(config, world, dataset, held, models, on_event))
    directory = stack.enter_context(ExitStack())
    for opened in (loop.log, loop.loader, loop.held_out):
        if opened is not None:
            stack.callback(opened.close)
    world.run_on_main(lambda: claim(folder, directory, resume=resume, overwrite=overwrite))
    start = _load_checkpoint(loop, len(dataset)) if resume else 0
    world.run_on_main(lambda: write_text(folder / SETTINGS, config.to_yaml()))
    loop.log.trim(start)
    world.barrier()
    _introduce(loop, start)
    if loop.monitor is not None and loop.monitor.note:
        loop.note(f"diagnostics=stability: {loop.monitor.note}.")
    for text in data_notes(config, dataset, held):
        loop.log.write("note", step=start, text=text)
        loop.note(text)
    return loop, start


def _introduce(loop: Loop, start: int) -> None:
    config, count, total = loop.config, loop.loader.count, loop.total
    held = 0 if loop.held_out is None else loop.held_out.count
    counts = {name: len(names) for name, names in loop.classes.items()}
    kinds = {name: target.kind for name, target in loop.models.targets.items()}
    parameters = sum(weight.numel() for weight in loop.models.model.parameters())
    loop.log.write(
        "setting", step=start, classes=counts, pictures=count, held_out=held, parameters=parameters, steps=total,
        model=config.model,
    )  # fmt: skip
    described = {
        name: VALUES.get(kinds.get(name, "")) or f"{number} classes{SUFFIXES.get(kinds.get(name, ''), '')}"
        for name, number in counts.items()
    }
    classes = ", ".join(f"{name}: {text}" for name, text in described.items()) or "no labels"
    text = (
        f"{count:,} training {loop.loader.dataset.noun}{f', {held:,} held out' if held else ''} ({classes}); "
        f"{config.model} with {parameters / 1e6:.3g} M parameters; {config.epochs} epochs of {loop.per_epoch} "
        f"steps, batch size {config.batch_size}"
    )
    loop.on_event(Event("start", text=text))
    if start >= total:
        loop.note(f"All {total} steps are done; there is nothing left to train.")
    elif config.compile not in (None, "off"):
        wait = "up to a minute on a GPU" if loop.world.device.type == "cuda" else "up to some minutes on a CPU"
        loop.note(f"The first steps compile (--compile {config.compile}), {wait}.")


def _resume_config(given: dict[str, Any]) -> Config:
    """Return the config of the run to resume; raise if an option that affects the result changes."""
    folder = Config.from_dict({"data": ".", **given}).folder
    recover(folder)
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


def _load_checkpoint(loop: Loop, count: int) -> int:
    """Load the newest complete checkpoint; return its step."""
    world, checkpoints = loop.world, loop.checkpoints
    step, skipped = world.run(checkpoints.newest)
    if step > loop.total:
        raise TrainingError(
            f"{checkpoints.path(step)} belongs to another run: this one has {loop.total} steps. Two runs have written "
            "to one directory; start over in another one"
        )
    meta = checkpoints.meta(step)
    for text in skipped:
        loop.note(f"{text[0].upper()}{text[1:]}; resuming from step {step} instead.")
    world.run(lambda: _check_config(loop, meta))
    world.run(lambda: _check_data(loop, meta, count))
    world.run(lambda: checkpoints.load(step, loop.tensors()))
    loop.meter.restore(meta["meter"])
    loop.best, loop.seconds = meta["best"], meta["seconds"]
    if loop.monitor is not None and meta.get("stability"):
        loop.monitor.restore(meta["stability"])
    before, now = meta["processes"], world.world_size
    if before != now:
        batch = loop.config.batch_size or 0
        loop.note(
            f"The world size changed from {before} ({batch // before} images per rank) to {now} ({batch // now}). "
            "Batches, augmentation and schedule stay the same; dropout, drop path and rounding differ."
        )
    return step


def _check_config(loop: Loop, meta: Mapping[str, Any]) -> None:
    """Raise if ``config.yaml`` was edited since: a run cannot go on with other options than those of its steps."""
    before, now = meta.get("config", {}), fixed_options(loop.config)
    for name in before:
        if name in now and json.loads(json.dumps(now[name])) != before[name]:
            raise TrainingError(
                f"{loop.folder / SETTINGS} has {name}={shown(now[name])}, but the run was started with "
                f"{shown(before[name])}. Change it back to resume, or start another run with it, with "
                f"model={loop.folder} to fine-tune its model"
            )


def _check_data(loop: Loop, meta: Mapping[str, Any], count: int) -> None:
    """Raise if the data is not the one that the run was started with."""
    if meta["examples"] != count or {k: tuple(v) for k, v in meta["classes"].items()} != loop.classes:
        before, now = ([name for names in each.values() for name in names] for each in (meta["classes"], loop.classes))
        new = [name for name in now if name not in before]
        raise TrainingError(
            f"data: the run was started with {meta['examples']} images of {len(before)} classes; got {count} of "
            f"{len(now)}{f', among them {new[0]!r}' if new else ''}. Resume with the same data"
        )
    differs = fingerprint_difference(meta["data"], loop.fingerprint, loop.classes) if "data" in meta else None
    if differs is not None:
        raise TrainingError(
            f"data: {differs}. Resume with the same data; for other data start another run, with "
            f"model={loop.config.folder} to fine-tune its model"
        )
