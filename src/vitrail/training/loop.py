"""The training loop: steps that depend on the seed and their number alone, with what happens between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.loading.order import generator, mix
from vitrail.errors import Diverged
from vitrail.training.config.syntax import read_every
from vitrail.training.distributed import broken_links
from vitrail.training.evaluation.metrics import reduce
from vitrail.training.evaluation.pass_ import evaluate
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.interrupt import Interrupted, OutOfTime, Stop
from vitrail.training.log import Event, Meter
from vitrail.training.optim.optimizer import lr_at, optimizer_tensors
from vitrail.training.parts import Parts
from vitrail.training.run_directory import BEST, LAST, Labels, Run, full, last_evaluation, write_model
from vitrail.training.step import Step, recorder_for, room_for_graphs, sound_attention

AUGMENT, MIX, MODEL = 1, 2, 3
"""Streams of random numbers, so that what is drawn for one thing does not shift another."""


class Loop:
    """One run, from any step to its end."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        config = parts.config
        self.per_epoch = parts.feed.steps_per_epoch
        self.total = (config.epochs or 0) * self.per_epoch
        self.meter = Meter(parts.crew.device)
        self.best: dict[str, Any] | None = None
        self.evaluation: Evaluation | None = None
        self.seconds = 0.0
        self._unreadable = 0
        self._compute = Step(parts, recorder_for(parts))
        self._evaluations = read_every("evaluate_every", config.evaluate_every)
        self._saves = read_every("save_every", config.save_every)
        self._local = (config.batch_size or 0) // parts.crew.world
        self._started = self._begun = time.perf_counter()
        self._since = 0

    # From the start to the end.

    def run(self, start: int, until: float = math.inf) -> Run:
        """Train from a step on; the first one is 0. Where it would be later than ``until``, stop with a checkpoint."""
        parts = self.parts
        parts.log.write("start", step=start, processes=parts.crew.world, device=str(parts.crew.device))
        stack = ExitStack()
        with stack, broken_links(parts.crew, self._last_checkpoint):
            stack.enter_context(sound_attention(parts.built))
            stack.enter_context(room_for_graphs(parts.config))
            stop = stack.enter_context(Stop.listening(until))
            self._started = self._begun = time.perf_counter()
            self._since = start
            self._tell_unreadable(start)
            for step in range(start, self.total):
                if step == start or step % self.per_epoch == 0:
                    self._set_merging(step // self.per_epoch)
                self._step(step)
                self._after(step + 1, stop)
            if start == self.total and not parts.crew.share((self._folder / LAST).is_dir()):
                self._set_merging(start // self.per_epoch - 1)
                self._finish(start)  # the checkpoint of the last step is there, and the model is not
            if stop.wanted:
                parts.tell(Event("note", text="Asked to stop when all steps were done: the run was finished instead."))
        return Run(self._folder, self.evaluation or last_evaluation(self._folder), self.best)

    def _after(self, done: int, stop: Stop) -> None:
        """Do what is due when so many steps are done."""
        config, ended = self.parts.config, done % self.per_epoch == 0
        if done % config.log_every == 0 or ended or self._watched:
            self._check(done, stop)
        if ended:
            self._end_epoch(done)
        if done == self.total:
            self._finish(done)
            return
        evaluated = self._evaluations.due(done, self.per_epoch)
        save = self._saves.due(done, self.per_epoch)
        if evaluated:
            self._evaluate(done)
        if save:
            self._save(done)
        if ended or evaluated or save:
            self._begun, self._since = time.perf_counter(), done

    def _finish(self, done: int) -> None:
        """Do what is left when all steps are done. Nobody stops it: there would be a run without its model."""
        self._evaluate(done)
        self._write(LAST, done)
        self._save(done)

    @property
    def _watched(self) -> bool:
        """Whether looking at each step costs nothing: the device is the CPU, and no other process takes part."""
        return self.parts.crew.world == 1 and self.parts.crew.device.type == "cpu"

    # One step.

    def _step(self, step: int) -> None:
        parts = self.parts
        images, labels, mixed = self._batch(step)
        torch.manual_seed(mix(parts.config.seed, MODEL, step, parts.crew.rank))
        for terms in self._compute(images, labels, mixed, self._lr(step)):
            self.meter.add(terms, step)
        if parts.ema is not None:
            parts.ema.update(step)
        after: Any = parts.learner.after_step
        after((step + 1) / self.total)

    def _batch(self, step: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Give this process's pictures of a step, augmented and mixed, with their labels."""
        parts, seed = self.parts, self.parts.config.seed
        rows = slice(parts.crew.rank * self._local, (parts.crew.rank + 1) * self._local)
        batch, total = parts.feed.batch(step), self._local * parts.crew.world
        plain = step >= self.total - parts.config.plain_epochs * self.per_epoch
        with torch.no_grad():
            augment = parts.settled if plain else parts.augment
            images = augment(batch.images, generator(parts.crew.device, seed, AUGMENT, step), rows, total)
            if plain:
                mixed = parts.mixing.idle(images)
            else:
                mixed = parts.mixing(images, generator(parts.crew.device, seed, MIX, step), rows, total)
        return mixed.images, batch.labels, None if mixed.partner is None else (mixed.partner, mixed.share)

    def _lr(self, step: int) -> float:
        config = self.parts.config
        warmup = (config.warmup_epochs or 0) * self.per_epoch
        return lr_at(step, peak=config.lr or 0.0, warmup=warmup, total=self.total, floor=config.min_lr)

    def _set_merging(self, epoch: int) -> None:
        parts, plan = self.parts, self.parts.config.merge
        if parts.merging is not None:
            wanted = [round(r * plan.share_at(epoch)) for r in parts.r]
            if parts.merging.r != wanted:
                parts.merging.r = wanted

    # Between steps.

    def _check(self, done: int, stop: Stop) -> None:
        """Look whether all is finite and nothing wants to stop, all processes together, and tell how far it is."""
        parts = self.parts
        found = parts.crew.gather((self.meter.fault(), stop.wanted, stop.late))
        faults = [(*fault, rank) for rank, (fault, *_) in enumerate(found) if fault is not None]
        if faults:
            self._give_up(*min(faults))
        asked, late = (any(each) for each in list(zip(*found, strict=True))[1:])
        if (asked or late) and done < self.total:
            self._save(done)
            kind, why = (Interrupted, "") if asked else (OutOfTime, ", the time being over")
            parts.crew.fail(kind(f"Stopped after step {done} of {self.total}{why}. {self._last_checkpoint()}"))
        values = {**self.meter.means(reduce), "lr": self._lr(done - 1), "images_per_s": self._speed(done)}
        parts.tell(Event("train", done, self.total, {"epoch": (done - 1) // self.per_epoch, **values}))
        if done % parts.config.log_every == 0:
            parts.log.write("train", step=done, epoch=(done - 1) / self.per_epoch, **values)

    def _give_up(self, step: int, terms: list[str], rank: int) -> None:
        where = f" on process {rank}" if self.parts.crew.world > 1 else ""
        error = Diverged(
            f"The loss is not finite since step {step} (epoch {step // self.per_epoch}){where}: {', '.join(terms)}. "
            f"The learning rate was {self._lr(step):.3g}. Nothing was saved since. Try a smaller lr, a longer "
            f"warmup_epochs, a smaller clip, or dtype=fp32. {self._last_checkpoint()}"
        )
        self.parts.crew.fail(error)

    def _end_epoch(self, done: int) -> None:
        means, epoch = self.meter.means(reduce), done // self.per_epoch - 1
        values = {"lr": self._lr(done - 1), "images_per_s": self._speed(done), "seconds": self._clock()}
        self.parts.log.write("epoch", step=done, epoch=epoch, losses=means, **values, **self._merged())
        self.parts.tell(Event("epoch", done, self.total, {"epoch": epoch, **means, **values}))
        self.meter.reset()
        self._tell_unreadable(done)

    def _tell_unreadable(self, done: int) -> None:
        """Say which pictures could not be read, as soon as somebody tried."""
        parts = self.parts
        skipped = [*parts.feed.skipped, *(parts.held.skipped if parts.held is not None else ())]
        if len(skipped) > self._unreadable:
            self._unreadable = len(skipped)
            few = "; ".join(why for _, why in skipped[:3])
            parts.log.write("unreadable", step=done, count=len(skipped), names=[name for name, _ in skipped[:100]])
            parts.tell(Event("note", text=f"{len(skipped)} pictures cannot be read and are left out: {few}"))

    def _evaluate(self, done: int) -> None:
        """Evaluate, where there is something to evaluate on, and keep the model if it is the best so far."""
        parts, config = self.parts, self.parts.config
        if parts.held is None:
            return
        if parts.crew.device.type == "cuda":
            torch.cuda.synchronize()
        count = parts.held.count
        said = partial(self._said, count)
        half = torch.bfloat16 if config.half else None
        with parts.ema.applied() if parts.ema is not None else nullcontext():
            found = evaluate(
                self._model, parts.held, prepare=parts.augment.plain, batch=min(256, count), dtype=half,
                look=0 if self._sharded else 256, seconds=0, progress=said,
            )  # fmt: skip
            self.evaluation = found
            better = self.best is None or found.score >= self.best["score"]
            if better:
                self.best = {"score": found.score, "step": done}
            parts.log.write("evaluation", step=done, epoch=done / self.per_epoch, score=found.score, **found.summary())
            parts.tell(Event("evaluation", done, self.total, {"score": found.score, **found.summary()}))
        if better:
            self._write(BEST, done)

    def _said(self, count: int, done: int) -> None:
        self.parts.tell(Event("evaluating", done * self.parts.crew.world, count))

    def _write(self, name: str, done: int) -> None:
        write = self._writer(done)
        self.parts.crew.first_does(lambda: write(self._folder / name))

    def _writer(self, done: int) -> Callable[[Path], None]:
        """Give what writes the model as it is used: averaged weights, where they are averaged."""
        parts = self.parts
        states = full(self._model.state_dict() if parts.ema is None else parts.ema.tensors)
        trained: dict[str, Any] = {
            "step": done,
            "epochs": done / self.per_epoch,
            "weights": "averaged" if parts.ema else "last",
        }
        if self.evaluation is not None:
            trained["evaluation"] = self.evaluation.summary()
        labels = Labels(
            parts.classes, parts.built.preprocessing, {**trained, **self._merged()}, parts.built.architecture
        )
        return lambda folder: write_model(folder, self._model, states, labels)

    def _save(self, done: int) -> None:
        parts = self.parts
        meta = {
            "step": done,
            "processes": parts.crew.world,
            "meter": self.meter.to_dict(),
            "best": self.best,
            "evaluation": None if self.evaluation is None else self.evaluation.score,
            "seconds": self._clock(),
            "examples": parts.feed.count,
            "classes": parts.classes,
            "data": parts.data,
        }
        model = None if self._sharded else self._writer(done)
        path = parts.checkpoints.save(done, self.tensors(), meta, model)
        if path is not None:
            parts.tell(Event("saved", done, self.total, text=str(path)))

    # Small things.

    def tensors(self) -> dict[str, Tensor]:
        """Give all that a checkpoint holds, by name: the tensors themselves."""
        parts = self.parts
        found = {f"learner.{name}": value for name, value in parts.learner.state_dict().items()}
        found |= {f"optimizer.{name}": value for name, value in optimizer_tensors(parts.optimizer).items()}
        averaged = {} if parts.ema is None else parts.ema.tensors
        return found | {f"ema.{name}": value for name, value in averaged.items()}

    @property
    def _sharded(self) -> bool:
        """Whether processes hold parts of the model, which nobody should have to hold whole."""
        return self.parts.wrapped is self.parts.learner and self.parts.crew.world > 1

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.parts.learner.model  # type: ignore[assignment]
        return model

    @property
    def _folder(self) -> Path:
        """The run's folder."""
        return self.parts.checkpoints.folder.parent

    def _merged(self) -> dict[str, Any]:
        return {} if self.parts.merging is None else {"merge": self.parts.merging.config}

    def _speed(self, done: int) -> float:
        """Pictures per second since the epoch began, or since the last evaluation or checkpoint in it."""
        passed = max(time.perf_counter() - self._begun, 1e-9)
        return (done - self._since) * (self.parts.config.batch_size or 0) / passed

    def _clock(self) -> float:
        """Seconds of training, those before the last start included."""
        return self.seconds + time.perf_counter() - self._started

    def _last_checkpoint(self) -> str:
        steps = self.parts.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet."
        return f"Go on with resume=True (--resume) from {self.parts.checkpoints.path(steps[-1])}."
