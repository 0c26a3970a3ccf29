"""The training loop: steps that depend only on the seed and their number, and what happens between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loading.order import generator, mix
from vitrail.errors import Diverged
from vitrail.training.config.syntax import read_interval
from vitrail.training.distributed import explain_failures
from vitrail.training.evaluation.evaluator import evaluate_model
from vitrail.training.evaluation.metrics import all_reduce
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.interrupt import Interrupted, OutOfTime, Stop
from vitrail.training.log import Event, Meter
from vitrail.training.optim.optimizer import lr_at, optimizer_tensors
from vitrail.training.run_directory import BEST, LAST, Labels, Run, gather_full, last_evaluation, write_model
from vitrail.training.setup import Setup
from vitrail.training.step import Step, capture_for, raised_recompile_limit, safe_attention

AUGMENT, MIX, MODEL = 1, 2, 3
"""Random streams of a step, independent of each other."""


class Loop:
    """The loop of one run, from any step to its end."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        config = setup.config
        self.per_epoch = setup.loader.steps_per_epoch
        self.total = (config.epochs or 0) * self.per_epoch
        self.meter = Meter(setup.world.device)
        self.best: dict[str, Any] | None = None
        self.evaluation: Evaluation | None = None
        self.seconds = 0.0
        self._unreadable = 0
        self._step = Step(setup, capture_for(setup))
        self._folder = config.folder
        self._evaluation_steps = read_interval(config.evaluate_every, self.per_epoch)
        self._save_steps = read_interval(config.save_every, self.per_epoch)
        self._local_batch = (config.batch_size or 0) // setup.world.world_size
        self._started = self._timed_from = time.perf_counter()
        self._timed_step = 0

    def run(self, start: int, until: float = math.inf) -> Run:
        """Train from a step on; stop with a checkpoint once `time.monotonic` exceeds ``until``."""
        setup = self.setup
        setup.log.write("start", step=start, processes=setup.world.world_size, device=str(setup.world.device))
        with ExitStack() as stack, explain_failures(setup.world, self._resume_hint):
            stack.enter_context(safe_attention(setup.models.built))
            stack.enter_context(raised_recompile_limit(setup.config))
            stop = stack.enter_context(Stop.listening(until))
            self._started = time.perf_counter()
            self._restart_clock(start)
            self._report_unreadable(start)
            for step in range(start, self.total):
                if step == start or step % self.per_epoch == 0:
                    self._set_merging(step // self.per_epoch)
                self._train_step(step)
                self._after_step(step + 1, stop)
            if start == self.total and not setup.world.broadcast((self._folder / LAST).is_dir()):
                self._set_merging(start // self.per_epoch - 1)
                self._finish(start)  # interrupted between the last checkpoint and the model
            if stop.wanted:
                setup.note("Interrupted after the last step: the run was finished instead.")
        return Run(self._folder, self.evaluation or last_evaluation(self._folder), self.best)

    # A step

    def _train_step(self, step: int) -> None:
        setup = self.setup
        images, labels, mixed = self._batch(step)
        torch.manual_seed(mix(setup.config.seed, MODEL, step, setup.world.rank))
        for terms in self._step(images, labels, mixed, self._lr(step)):
            self.meter.add(terms, step)
        if setup.ema is not None:
            setup.ema.update(step)
        after_step: Any = setup.models.learner.after_step
        after_step((step + 1) / self.total)

    def _batch(self, step: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return this rank's images of a step, augmented and mixed, and their labels."""
        setup, seed, device = self.setup, self.setup.config.seed, self.setup.world.device
        rows = slice(setup.world.rank * self._local_batch, (setup.world.rank + 1) * self._local_batch)
        batch, total = setup.loader.batch(step), self._local_batch * setup.world.world_size
        plain = step >= self.total - setup.config.plain_epochs * self.per_epoch
        with torch.no_grad():
            augment = setup.plain_augment if plain else setup.augment
            images = augment(batch.images, generator(device, seed, AUGMENT, step), rows, total)
            if plain:
                mixed = setup.mixing.idle(images)
            else:
                mixed = setup.mixing(images, generator(device, seed, MIX, step), rows, total)
        return mixed.images, batch.labels, None if mixed.partner is None else (mixed.partner, mixed.share)

    def _lr(self, step: int) -> float:
        config = self.setup.config
        warmup = (config.warmup_epochs or 0) * self.per_epoch
        return lr_at(step, peak=config.lr or 0.0, warmup=warmup, total=self.total, floor=config.min_lr)

    def _set_merging(self, epoch: int) -> None:
        models, plan = self.setup.models, self.setup.config.merge
        if models.merging is not None:
            r = [round(final * plan.share_at(epoch)) for final in models.final_r]
            if models.merging.r != r:
                models.merging.r = r

    # Between steps

    def _after_step(self, done: int, stop: Stop) -> None:
        """Check, log, evaluate and save as due after ``done`` steps."""
        setup, epoch_ended = self.setup, done % self.per_epoch == 0
        free = setup.world.world_size == 1 and setup.world.device.type == "cpu"  # checking costs nothing
        if done % setup.config.log_every == 0 or epoch_ended or free:
            self._check(done, stop)
        if epoch_ended:
            self._end_epoch(done)
        if done == self.total:
            self._finish(done)
            return
        evaluate, save = done % self._evaluation_steps == 0, done % self._save_steps == 0
        if evaluate:
            self._evaluate(done)
        if save:
            self._save(done)
        if epoch_ended or evaluate or save:
            self._restart_clock(done)

    def _check(self, done: int, stop: Stop) -> None:
        """Stop all ranks if a loss is not finite or an interrupt arrived; report progress."""
        setup = self.setup
        found = setup.world.all_gather((self.meter.first_nonfinite(), stop.wanted, stop.late))
        faults = [(*fault, rank) for rank, (fault, *_) in enumerate(found) if fault is not None]
        if faults:
            step, terms, rank = min(faults)
            where = f" on rank {rank}" if setup.world.world_size > 1 else ""
            setup.world.fail(
                Diverged(
                    f"The loss is not finite since step {step} (epoch {step // self.per_epoch}){where}: "
                    f"{', '.join(terms)}. The learning rate was {self._lr(step):.3g}. Nothing was saved since. Reduce "
                    f"lr or clip, increase warmup_epochs, or use dtype=fp32. {self._resume_hint()}"
                )
            )
        wanted, late = (any(each) for each in list(zip(*found, strict=True))[1:])
        if (wanted or late) and done < self.total:
            self._save(done)
            kind, why = (Interrupted, "") if wanted else (OutOfTime, ": the time limit is reached")
            setup.world.fail(kind(f"Stopped after step {done} of {self.total}{why}. {self._resume_hint()}"))
        values = {**self.meter.means(all_reduce), "lr": self._lr(done - 1), "images_per_s": self._throughput(done)}
        setup.on_event(Event("train", done, self.total, {"epoch": (done - 1) // self.per_epoch, **values}))
        if done % setup.config.log_every == 0:
            setup.log.write("train", step=done, epoch=(done - 1) / self.per_epoch, **values)

    def _end_epoch(self, done: int) -> None:
        means, epoch = self.meter.means(all_reduce), done // self.per_epoch - 1
        values = {"lr": self._lr(done - 1), "images_per_s": self._throughput(done), "seconds": self._elapsed()}
        self.setup.log.write("epoch", step=done, epoch=epoch, losses=means, **values, **self._merge_config())
        self.setup.on_event(Event("epoch", done, self.total, {"epoch": epoch, **means, **values}))
        self.meter.reset()
        self._report_unreadable(done)

    def _report_unreadable(self, done: int) -> None:
        """Log images that turned out to be unreadable."""
        setup = self.setup
        skipped = [*setup.loader.skipped, *(setup.held_out.skipped if setup.held_out is not None else ())]
        if len(skipped) > self._unreadable:
            self._unreadable = len(skipped)
            setup.log.write("unreadable", step=done, count=len(skipped), names=[name for name, _ in skipped[:100]])
            setup.note(f"Skipped {len(skipped)} unreadable images: {'; '.join(why for _, why in skipped[:3])}")

    def _evaluate(self, done: int) -> None:
        """Evaluate on the held-out data, and write the model if it is the best so far."""
        setup = self.setup
        if setup.held_out is None:
            return
        if setup.world.device.type == "cuda":
            torch.cuda.synchronize()
        count = setup.held_out.count
        with setup.ema.applied() if setup.ema is not None else nullcontext():
            found = evaluate_model(
                setup.models.model, setup.held_out, prepare=setup.augment.plain, batch=min(256, count),
                dtype=torch.bfloat16 if setup.config.half else None, look=0 if setup.sharded else 256, seconds=0,
                progress=lambda seen: setup.on_event(Event("evaluating", seen * setup.world.world_size, count)),
            )  # fmt: skip
        self.evaluation = found
        values = {"score": found.score, **found.summary()}
        setup.log.write("evaluation", step=done, epoch=done / self.per_epoch, **values)
        setup.on_event(Event("evaluation", done, self.total, values))
        if self.best is None or found.score >= self.best["score"]:
            self.best = {"score": found.score, "step": done}
            self._write_model(BEST, done)

    # Files

    def _finish(self, done: int) -> None:
        """Evaluate, write the model and save. Interrupts are ignored here, so that no run ends without its model."""
        self._evaluate(done)
        self._write_model(LAST, done)
        self._save(done)

    def _write_model(self, name: str, done: int) -> None:
        write = self._model_writer(done)
        self.setup.world.run_on_main(lambda: write(self._folder / name))

    def _model_writer(self, done: int) -> Callable[[Path], None]:
        """Return a function that writes the model, with averaged weights if there are any, to a directory."""
        setup = self.setup
        model = setup.models.model
        states = gather_full(model.state_dict() if setup.ema is None else setup.ema.tensors)
        trained: dict[str, Any] = {
            "step": done,
            "epochs": done / self.per_epoch,
            "weights": "averaged" if setup.ema else "last",
        }
        if self.evaluation is not None:
            trained["evaluation"] = self.evaluation.summary()
        trained |= self._merge_config()
        labels = Labels(setup.classes, setup.preprocessing, trained, setup.models.built.architecture)
        return lambda folder: write_model(folder, model, states, labels)

    def _save(self, done: int) -> None:
        setup = self.setup
        meta = {
            "step": done,
            "processes": setup.world.world_size,
            "meter": self.meter.to_dict(),
            "best": self.best,
            "evaluation": None if self.evaluation is None else self.evaluation.score,
            "seconds": self._elapsed(),
            "examples": setup.loader.count,
            "classes": setup.classes,
            "data": setup.data,
        }
        model = None if setup.sharded else self._model_writer(done)
        path = setup.checkpoints.save(done, self.tensors(), meta, model)
        if path is not None:
            setup.on_event(Event("saved", done, self.total, text=str(path)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint (not copies) by name."""
        setup = self.setup
        tensors = {f"learner.{name}": value for name, value in setup.models.learner.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors(setup.optimizer).items()}
        averaged = {} if setup.ema is None else setup.ema.tensors
        return tensors | {f"ema.{name}": value for name, value in averaged.items()}

    def _merge_config(self) -> dict[str, Any]:
        merging = self.setup.models.merging
        return {} if merging is None else {"merge": merging.config}

    def _restart_clock(self, done: int) -> None:
        """Measure throughput from here: after an epoch, an evaluation or a checkpoint."""
        self._timed_from, self._timed_step = time.perf_counter(), done

    def _throughput(self, done: int) -> float:
        passed = max(time.perf_counter() - self._timed_from, 1e-9)
        return (done - self._timed_step) * (self.setup.config.batch_size or 0) / passed

    def _elapsed(self) -> float:
        """Return the seconds of training, including those before a resume."""
        return self.seconds + time.perf_counter() - self._started

    def _resume_hint(self) -> str:
        steps = self.setup.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet."
        return f"Resume with resume=True (--resume) from {self.setup.checkpoints.path(steps[-1])}."
