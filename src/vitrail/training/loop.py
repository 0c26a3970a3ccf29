"""The training loop: steps that depend only on the seed and their number, and what happens between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitrail._distributed import World
from vitrail.data.augment.mix import Mix
from vitrail.data.augment.views import Views
from vitrail.data.dataset import Dataset
from vitrail.data.loading.loader import Loader, make_loader
from vitrail.data.loading.order import generator, mix
from vitrail.errors import Diverged, ModelLoadError, TrainingError
from vitrail.models.saving import CONFIG
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import Config, fixed_options
from vitrail.training.config.syntax import read_interval
from vitrail.training.data import prepares, split_pixels
from vitrail.training.distributed import explain_failures, wrap
from vitrail.training.evaluation.evaluator import evaluate_model
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.evaluation.tallies import all_reduce
from vitrail.training.interrupt import Interrupted, OutOfTime, Stop
from vitrail.training.log import Event, Log, Meter, OnEvent
from vitrail.training.model import Models
from vitrail.training.objective.objective import Terms
from vitrail.training.optim.ema import Ema
from vitrail.training.optim.optimizer import lr_at, make_optimizer, optimizer_tensors
from vitrail.training.run_directory import (
    BEST,
    CHECKPOINTS,
    LAST,
    LOG,
    Labels,
    Run,
    forget_previous,
    last_evaluation,
    write_model,
)
from vitrail.training.stability.monitor import KIND, Monitor
from vitrail.training.step import Step, capture_for, raised_recompile_limit, safe_attention

AUGMENT, MIX, MODEL = 1, 2, 3
"""Random streams of a step, independent of each other."""


REMEDY = "Reduce lr or clip, increase warmup_epochs, or use dtype=fp32."
"""What helps a run that diverges."""


class Loop:
    """The loop of one run, from any step to its end."""

    def __init__(
        self, config: Config, world: World, dataset: Dataset, held: Dataset | None, models: Models, on_event: OnEvent
    ) -> None:
        """Open the data loaders, compile and wrap the model, and create the optimizer. Nothing is written."""
        self.config, self.world, self.models, self.on_event = config, world, models, on_event
        self.folder = config.folder
        schedule = {"batch": config.batch_size or 1, "seed": config.seed, "repeats": config.repeats or 1}
        self.loader = self._open_loader(dataset, f"training {dataset.noun}", **schedule)
        self.held_out = None if held is None else self._open_loader(held, f"held-out {dataset.noun}")
        self.classes = dict(self.loader.classes)
        self.pixel_bytes = dataset.pixel_bytes
        self.fingerprint = dataset.fingerprint()
        self.preprocessing = dataset.statistics() or models.preprocessing
        compiled = config.compile != "off"
        augment = prepares(self.preprocessing, config.augment, config.crop_min or 1.0, config.erasing, compiled)
        self.augment: Any = augment if config.recipe == "labels" else Views(augment)  # type: ignore[arg-type]
        self.plain_augment = augment.settled()
        self.mixing = Mix(config.mixup or 0.0, config.cutmix or 0.0, config.mixing, compiled=compiled)
        wrapped = wrap(models.learner, config, world)
        self.sharded = wrapped is models.learner and world.world_size > 1
        decay = config.weight_decay or 0.0
        self.optimizer = make_optimizer(models.learner, config.lr or 0.0, decay, config.optimizer, models.rates)
        self.ema = Ema(models.model, config.ema) if config.ema else None
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, config.keep, world)
        self.log = Log(
            self.folder / LOG if world.is_main else None, self.folder / "tensorboard" if config.tensorboard else None
        )
        self.monitor = (
            Monitor(models.model, models.learner, world.device) if config.diagnostics == "stability" else None
        )
        watching = {} if self.monitor is None else {"after_backward": self.monitor.record_gradients}
        self.step = Step(config, models, wrapped, self.optimizer, capture_for(config, world), self.note, **watching)
        self.per_epoch = self.loader.steps_per_epoch
        self.total = (config.epochs or 0) * self.per_epoch
        self.meter = Meter(world.device)
        self.best: dict[str, Any] | None = None
        self.evaluation: Evaluation | None = None
        self.seconds = 0.0
        self._unreadable = 0
        self._finite_at = -1
        self._stamp, self._noticed = dataset.stamp() if world.is_main else {}, False
        self._dataset = dataset
        self._evaluation_steps = read_interval(config.evaluate_every, self.per_epoch)
        self._save_steps = read_interval(config.save_every, self.per_epoch)
        self._local_batch = (config.batch_size or 0) // world.world_size
        self._started = self._timed_from = time.perf_counter()
        self._timed_step = 0

    def _open_loader(self, dataset: Dataset, what: str, **schedule: int) -> Loader:
        """Return a data loader; without a schedule it is for evaluation only."""
        config, world = self.config, self.world
        return make_loader(
            dataset, image_size=config.side or 1, device=world.device, rank=world.rank, world_size=world.world_size,
            keep=config.keep_data,  # type: ignore[arg-type]
            workers=config.workers, max_unreadable=config.max_unreadable,
            progress=lambda done, total: self.on_event(Event("reading", done, total, text=what)),
            **schedule,
        )  # fmt: skip

    def note(self, text: str) -> None:
        self.on_event(Event("note", text=text))

    def run(self, start: int, until: float = math.inf) -> Run:
        """Train from a step on; stop with a checkpoint once `time.monotonic` exceeds ``until``."""
        self.log.write("start", step=start, processes=self.world.world_size, device=str(self.world.device))
        with ExitStack() as stack, explain_failures(self.world, self._resume_hint):
            stack.enter_context(safe_attention(self.models))
            stack.enter_context(raised_recompile_limit(self.config, self.models))
            stop = stack.enter_context(Stop.listening(until))
            self._started = time.perf_counter()
            self._restart_clock(start)
            self._report_unreadable(start)
            for step in range(start, self.total):
                if step == start or step % self.per_epoch == 0:
                    self._set_merging(step // self.per_epoch)
                self._train_step(step)
                self._after_step(step + 1, stop)
            if start == self.total and not self.world.broadcast((self.folder / LAST / CONFIG).is_file()):
                self._set_merging(start // self.per_epoch - 1)
                self._finish(start)  # interrupted between the last checkpoint and the model
            if stop.wanted:
                self.note("Interrupted after the last step: the run was finished instead.")
        return Run(self.folder, self.evaluation or last_evaluation(self.folder), self.best)

    # A step

    def _train_step(self, step: int) -> None:
        images, labels, mixed = self._batch(step)
        torch.manual_seed(mix(self.config.seed, MODEL, step, self.world.rank))
        found = self.step(images, labels, mixed, self._lr(step))
        for terms in found:
            self.meter.add(terms, step)
        if self.monitor is not None:
            self._watch(self.monitor, found, images, step + 1)
        if self.ema is not None:
            self.ema.update(step)
        after_step: Any = self.models.learner.after_step
        after_step((step + 1) / self.total)

    def _watch(self, monitor: Monitor, found: Sequence[Terms], images: Tensor, done: int) -> None:
        """Measure stability, and write what an interval between two log lines showed."""
        monitor.add(found)
        if done % self.config.log_every == 0 or done == self.total:
            seen = images if self.config.recipe == "labels" else images[:, 0]  # one of the views
            dtype = torch.bfloat16 if self.config.half else None
            self.log.write(KIND, step=done, **monitor.take(seen, all_reduce, self.world.world_size, dtype))

    def _batch(self, step: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return this rank's images of a step, augmented and mixed, and their labels."""
        config, device, rank, size = self.config, self.world.device, self.world.rank, self._local_batch
        rows, total = slice(rank * size, (rank + 1) * size), size * self.world.world_size
        batch = self.loader.batch(step)
        plain = step >= self.total - config.plain_epochs * self.per_epoch
        augment = self.plain_augment if plain else self.augment
        with torch.no_grad():
            images = augment(batch.images, generator(device, config.seed, AUGMENT, step), rows, total)
            images, labels = split_pixels(images, batch.labels, self.pixel_bytes)
            draw = generator(device, config.seed, MIX, step)
            mixed = self.mixing.idle(images) if plain else self.mixing(images, draw, rows, total)
        return mixed.images, labels, None if mixed.partner is None else (mixed.partner, mixed.share)

    def _lr(self, step: int) -> float:
        config = self.config
        warmup = (config.warmup_epochs or 0) * self.per_epoch
        return lr_at(step, peak=config.lr or 0.0, warmup=warmup, total=self.total, floor=config.min_lr)

    def _set_merging(self, epoch: int) -> None:
        models, plan = self.models, self.config.merge
        if models.merging is not None and models.final_r:
            r = [round(final * plan.share_at(epoch)) for final in models.final_r]
            if models.merging.r != r:
                models.merging.r = r

    # Between steps

    def _after_step(self, done: int, stop: Stop) -> None:
        """Check, log, evaluate and save as due after ``done`` steps."""
        epoch_ended = done % self.per_epoch == 0
        free = self.world.world_size == 1 and self.world.device.type == "cpu"  # checking costs nothing
        if done % self.config.log_every == 0 or epoch_ended or free:
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
        found = self.world.all_gather((self.meter.first_nonfinite(), stop.wanted, stop.late))
        self._refuse_divergence([fault for fault, *_ in found], done)
        wanted, late = (any(each) for each in list(zip(*found, strict=True))[1:])
        if (wanted or late) and done < self.total:
            self._save(done)
            kind, why = (Interrupted, "") if wanted else (OutOfTime, ": the time limit is reached")
            self.world.fail(kind(f"Stopped after step {done} of {self.total}{why}. {self._resume_hint()}"))
        values = {**self.meter.means(all_reduce), "lr": self._lr(done - 1), "images_per_s": self._throughput(done)}
        self.on_event(Event("train", done, self.total, {"epoch": (done - 1) // self.per_epoch, **values}))
        if done % self.config.log_every == 0:
            self.log.write("train", step=done, epoch=(done - 1) / self.per_epoch, **values)

    def _refuse_divergence(self, losses: Sequence[tuple[int, list[str]] | None], done: int) -> None:
        """Raise on all ranks if a loss was not finite; ``losses`` are the first such step and its terms by rank."""
        faults = [(*fault, rank) for rank, fault in enumerate(losses) if fault is not None]
        if faults:
            if self.monitor is not None and self.monitor.started:
                self.log.write(KIND, step=done, **self.monitor.take(None, all_reduce, self.world.world_size))
            step, terms, rank = min(faults)
            where = f" on rank {rank}" if self.world.world_size > 1 else ""
            batch = f"epoch {step // self.per_epoch}, batch {step % self.per_epoch}"
            self.world.fail(
                Diverged(
                    f"The loss is not finite since step {step} ({batch}){where}: {', '.join(terms)}. The learning rate "
                    f"was {self._lr(step):.3g}. Nothing was saved since. {REMEDY} {self._resume_hint()}"
                )
            )

    def _refuse_nonfinite(self, done: int) -> None:
        """Raise on all ranks rather than save weights after ``done`` steps that are not finite.

        A checkpoint replaces an older one, so it must be one to go on from. Called once per step that saves: it reads
        the weights, as saving does, and synchronizes with the device.
        """
        if self._finite_at == done:
            return
        found = self.world.all_gather((self.meter.first_nonfinite(), find_nonfinite(self.tensors())))
        self._refuse_divergence([loss for loss, _ in found], done)
        bad = sorted({name for _, names in found for name in names})
        if bad:
            self.world.fail(
                Diverged(
                    f"{len(bad)} tensors are not finite after step {done - 1} (epoch {(done - 1) // self.per_epoch}), "
                    f"the first {bad[0]}. The learning rate was {self._lr(done - 1):.3g}. They were not saved. "
                    f"{REMEDY} {self._resume_hint()}"
                )
            )
        self._finite_at = done

    def _end_epoch(self, done: int) -> None:
        means, epoch = self.meter.means(all_reduce), done // self.per_epoch - 1
        values = {"lr": self._lr(done - 1), "images_per_s": self._throughput(done), "seconds": self._elapsed()}
        self.log.write("epoch", step=done, epoch=epoch, losses=means, **values, **self._merge_config())
        self.on_event(Event("epoch", done, self.total, {"epoch": epoch, **means, **values}, self.loader.dataset.noun))
        self.meter.reset()
        self._report_unreadable(done)

    def _report_unreadable(self, done: int) -> None:
        """Log images that turned out to be unreadable."""
        skipped = [*self.loader.skipped, *(self.held_out.skipped if self.held_out is not None else ())]
        if len(skipped) > self._unreadable:
            self._unreadable = len(skipped)
            self.log.write("unreadable", step=done, count=len(skipped), names=[name for name, _ in skipped[:100]])
            reasons = "; ".join(why for _, why in skipped[:3])
            self.note(f"Skipped {len(skipped)} unreadable {self.loader.dataset.noun}: {reasons}")

    def _evaluate(self, done: int) -> None:
        """Evaluate on the held-out data, and write the model if it is the best so far."""
        self._refuse_nonfinite(done)
        if self.held_out is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        count = self.held_out.count
        with self.ema.applied() if self.ema is not None else nullcontext():
            found = evaluate_model(
                self.models.model, self.held_out, targets=self.models.targets, prepare=self.augment.plain,
                batch=min(256, count),
                dtype=torch.bfloat16 if self.config.half else None, look=0 if self.sharded else 256, seconds=0,
                progress=lambda seen: self.on_event(Event("evaluating", seen * self.world.world_size, count)),
            )  # fmt: skip
        self.evaluation = found
        values = {"score": found.score, **found.summary()}
        self.log.write("evaluation", step=done, epoch=done / self.per_epoch, **values)
        self.on_event(Event("evaluation", done, self.total, values))
        if self.best is None or found.score >= self.best["score"]:
            best = {"score": found.score, "step": done}
            try:
                self._write_model(BEST, done)
            except ModelLoadError as error:  # a full disk, on all ranks: the one before is kept
                self.note(f"{self.folder / BEST} is not updated: {error}. Training continues; free some disk space")
            else:
                self.best = best

    # Files

    def _finish(self, done: int) -> None:
        """Evaluate, write the model and save. Interrupts are ignored here, so that no run ends without its model."""
        self._evaluate(done)
        try:
            self._write_model(LAST, done)
        except ModelLoadError as error:
            self._save(done)
            self.world.fail(
                TrainingError(f"The run is finished, but its model is not saved: {error}. {self._resume_hint()}")
            )
        self._save(done)

    def _write_model(self, name: str, done: int) -> None:
        write = self._model_writer(done)
        problem = self.world.broadcast(_fault_of(lambda: write(self.folder / name)) if self.world.is_main else None)
        if problem is not None:
            raise ModelLoadError(problem)

    def _model_writer(self, done: int) -> Callable[[Path], None]:
        """Return a function that writes the model, averaged if there are averages; every rank must call this method."""
        model = self.models.model
        with torch.no_grad():
            states = {  # sharded ones are gathered on the host
                name: value.full_tensor().cpu() if isinstance(value, DTensor) else value.detach()
                for name, value in (model.state_dict() if self.ema is None else self.ema.tensors).items()
            }
        trained: dict[str, Any] = {
            "step": done,
            "epochs": done / self.per_epoch,
            "weights": "averaged" if self.ema else "last",
        }
        trained |= {} if self.evaluation is None else {"evaluation": self.evaluation.summary()}
        trained |= self._merge_config()
        models = self.models
        labels = Labels(self.classes, self.preprocessing, trained, models.architecture, targets=dict(models.targets))
        return lambda folder: write_model(folder, model, states, labels)

    def _save(self, done: int) -> None:
        self._refuse_nonfinite(done)
        self._notice_changes(done)
        meta = {
            "step": done,
            "processes": self.world.world_size,
            "meter": self.meter.to_dict(),
            "best": self.best,
            "evaluation": None if self.evaluation is None else self.evaluation.score,
            "seconds": self._elapsed(),
            "examples": self.loader.count,
            "classes": self.classes,
            "data": self.fingerprint,
            "config": fixed_options(self.config),
            "stability": None if self.monitor is None else self.monitor.to_dict(),
        }
        model = None if self.sharded else self._model_writer(done)
        path = self.checkpoints.save(done, self.tensors(), meta, model)
        if path is not None:
            self.world.run_on_main(lambda: forget_previous(self.folder))
            self.on_event(Event("saved", done, self.total, text=str(path)))

    def _notice_changes(self, done: int) -> None:
        """Report once if files of the training data were changed, or removed, since the run started."""
        changed = [] if self._noticed or not self.world.is_main else self._dataset.changed_since(self._stamp)
        if changed:
            self._noticed = True
            self.log.write("changed", step=done, count=len(changed), names=changed[:100])
            self.note(
                f"{len(changed)} files of the training data changed while the run used them, such as {changed[0]}: the "
                "run cannot be repeated, and resuming it may be refused."
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint (not copies) by name."""
        tensors = {f"learner.{name}": value for name, value in self.models.learner.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors(self.optimizer).items()}
        averaged = {} if self.ema is None else self.ema.tensors
        return tensors | {f"ema.{name}": value for name, value in averaged.items()}

    def _merge_config(self) -> dict[str, Any]:
        merging = self.models.merging
        return {} if merging is None else {"merge": merging.config}

    def _restart_clock(self, done: int) -> None:
        """Measure throughput from here: after an epoch, an evaluation or a checkpoint."""
        self._timed_from, self._timed_step = time.perf_counter(), done

    def _throughput(self, done: int) -> float:
        passed = max(time.perf_counter() - self._timed_from, 1e-9)
        return (done - self._timed_step) * (self.config.batch_size or 0) / passed

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self._started

    def _resume_hint(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet."
        return f"Resume with resume=True (--resume) from {self.checkpoints.path(steps[-1])}."


@torch.no_grad()
def find_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors with a value that is NaN or infinite; of sharded ones, this rank's part counts.

    One reduction and one synchronization in all where everything is finite.
    """
    local = {
        name: value.to_local() if isinstance(value, DTensor) else value.detach()
        for name, value in tensors.items()
        if value.is_floating_point() and value.numel()
    }
    local = {name: value for name, value in local.items() if value.numel()}
    if not local or torch.nn.utils.get_total_norm(list(local.values()), math.inf).isfinite():
        return []
    return [name for name, value in local.items() if not value.isfinite().all()]


def _fault_of(work: Callable[[], object]) -> str | None:
    """Run a function; return the message of an error in writing a model, or None."""
    try:
        work()
    except (ModelLoadError, OSError) as error:
        return str(error)
    return None
