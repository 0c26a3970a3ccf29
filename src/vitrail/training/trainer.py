"""``train``: from a config to a run. Everything that can be wrong is found before anything is written."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from vitrail._distributed import Crew, joined
from vitrail.errors import InvalidOption
from vitrail.training.config.config import Config
from vitrail.training.data_warnings import remarks
from vitrail.training.log import Event, Tell, board_writer, nobody
from vitrail.training.loop import Loop
from vitrail.training.parts import Parts
from vitrail.training.resume import go_on, processes, resumed
from vitrail.training.run_directory import SETTINGS, Run, check_free, claim, keep_to_itself, write_text
from vitrail.training.setup import Made, assemble, make_parts, open_data


def train(
    config: Config | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    seconds: float | None = None,
    tell: Tell | None = None,
    **given: Any,
) -> Run:
    """Train a model.

    >>> run = train(data="photos", model="vit_tiny_patch16", preset="tiny")  # doctest: +SKIP
    >>> run.evaluation.accuracy["fused"]  # doctest: +SKIP

    Under ``torchrun`` the processes train together; the result is the same as that of one.

    Args:
        config: what to do; or its fields by name.
        resume: go on with the run in ``out``. What it was started with is read from there; fields that decide what is
            computed cannot change, those that decide where and how can.
        overwrite: begin anew where there is a run already.
        seconds: stop with a checkpoint when so many are over (`OutOfTime`), at the next line of the log or end of an
            epoch; ``resume`` goes on.
        tell: called with each `Event`, in the first process alone.
    """
    until = _until(seconds)
    if resume and overwrite:
        raise InvalidOption("resume goes on with a run and overwrite replaces it; give one of them")
    if config is not None:
        given = {**_changed(config), **given}
    with joined(given.get("device")) as crew:
        asked = crew.together(lambda: resumed(given) if resume else Config.from_dict(given))
        return _train(asked, crew, resume, overwrite, (tell or nobody) if crew.first else nobody, until)


def _until(seconds: float | None) -> float:
    """Say when a run that begins now is to stop."""
    if seconds is None:
        return math.inf
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidOption(f"seconds is how long to train, a number above 0, or None for no limit; got {seconds!r}")
    return time.monotonic() + seconds


def _train(asked: Config, crew: Crew, resume: bool, overwrite: bool, tell: Tell, until: float) -> Run:
    before = torch.get_float32_matmul_precision()
    if crew.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    loop, stack = None, ExitStack()
    try:
        loop, start = prepare(asked, crew, resume, overwrite, tell, stack)
        return loop.run(start, until)
    finally:
        torch.set_float32_matmul_precision(before)
        if loop is not None:
            loop.parts.log.close()
            for feed in (loop.parts.feed, loop.parts.held):
                if feed is not None:
                    feed.close()
        stack.close()


def prepare(asked: Config, crew: Crew, resume: bool, overwrite: bool, tell: Tell, stack: ExitStack) -> tuple[Loop, int]:
    """Check everything, then make the run's folder and all that the loop needs; give it with its first step.

    The folder is kept to this run until the stack is closed.
    """
    examples, held = crew.together(lambda: open_data(asked))
    config = asked.resolved(len(examples), cuda=crew.device.type == "cuda")
    folder = config.folder

    def check() -> Made:
        _check_batch(config, crew, len(examples))
        if config.tensorboard:
            board_writer()
        if config.graphs and (crew.world > 1 or crew.device.type != "cuda"):
            here = f"{crew.world} {processes(crew.world)} on {crew.device.type}"
            raise InvalidOption(f"graphs=True needs one process on a GPU, and this run has {here}; leave it out")
        if not resume:
            check_free(folder, overwrite=overwrite)
        return assemble(config, examples.classes, crew)

    built, teacher, learner, merging, r = crew.together(check)
    config = replace(config, image_size=built.preprocessing.size[0] if built.preprocessing.size else None)
    config = replace(config, side=config.side or config.image_size)
    parts = crew.together(lambda: make_parts(config, crew, examples, held, (built, teacher, learner, merging, r), tell))
    loop = Loop(parts)
    crew.first_does(lambda: _take(folder, resume, overwrite, stack))
    start = go_on(loop, len(examples)) if resume else 0
    crew.first_does(lambda: write_text(folder / SETTINGS, config.to_yaml()))
    parts.log.trim(start)
    crew.barrier()
    _introduce(parts, start, loop.total)
    for text in remarks(config, examples, held):
        parts.log.write("note", step=start, text=text)
        tell(Event("note", text=text))
    return loop, start


def _take(folder: Path, resume: bool, overwrite: bool, stack: ExitStack) -> None:
    keep_to_itself(folder, stack)
    if not resume:
        claim(folder, overwrite=overwrite)


def _introduce(parts: Parts, start: int, total: int) -> None:
    config, held = parts.config, 0 if parts.held is None else parts.held.count
    classes = ", ".join(f"{name}: {len(names)} classes" for name, names in parts.classes.items()) or "no labels"
    weights = sum(weight.numel() for weight in parts.built.model.parameters())
    told = {
        "pictures": parts.feed.count,
        "held_out": held,
        "parameters": weights,
        "steps": total,
        "model": config.model,
    }
    parts.log.write("setting", step=start, classes={name: len(names) for name, names in parts.classes.items()}, **told)
    evaluated = f", {held:,} to evaluate on" if held else ""
    text = (
        f"{parts.feed.count:,} pictures to learn from{evaluated} ({classes}); {config.model} with "
        f"{weights / 1e6:.3g} M parameters; {config.epochs} epochs of {total // (config.epochs or 1)} steps, "
        f"{config.batch_size} pictures each"
    )
    parts.tell(Event("start", text=text))
    if start >= total:
        parts.tell(Event("note", text=f"All {total} steps were done already; there is nothing left to train."))
    elif config.compile not in (None, "off"):
        wait = "up to a minute on a GPU" if parts.crew.device.type == "cuda" else "up to some minutes on a CPU"
        parts.tell(Event("note", text=f"The first steps compile (--compile {config.compile}), {wait}."))


def _changed(config: Config) -> dict[str, Any]:
    """Give the fields of a config that are not at their defaults."""
    plain = Config(data=config.data)
    return {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name == "data" or getattr(config, each.name) != getattr(plain, each.name)
    }


def _check_batch(config: Config, crew: Crew, count: int) -> None:
    parts = crew.world * config.accumulate
    even = 2 if (config.mixup or config.cutmix) else 1
    batch = config.batch_size or 0
    if batch > count:
        raise InvalidOption(f"batch_size={batch} is more than the {count} pictures to learn from; choose a smaller one")
    if batch % (parts * even):
        pairs = ", each an even number of pictures, as they are mixed in pairs" if even == 2 else ""
        raise InvalidOption(
            f"batch_size={batch} cannot be shared out among {crew.world} {processes(crew.world)} and "
            f"accumulate={config.accumulate} parts{pairs}; choose a multiple of {parts * even}"
        )
