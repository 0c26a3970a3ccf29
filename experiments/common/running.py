"""Training a study: the search first, then every arm with every seed; what is done already is not done again.

A row is written when a run ends. So a study may be killed at any time, and goes on where it was.
"""

from __future__ import annotations

import gc
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.common.choosing import best_point, run_key
from experiments.common.machine import Stopwatch, commit, machine
from experiments.common.rows import RESULTS, SEARCH, add_row, finished, pack, read_rows
from experiments.common.study import Arm, Row, RunOf, Study, Trained, plain
from vitrail.errors import Diverged, InvalidOption
from vitrail.training import Evaluation, Run, evaluate, train
from vitrail.training.stopping import Interrupted, Stop

HELD = 0.1
"""The share of the training data that the search is evaluated on; the validation set has no part in it."""


Kind = Literal["search", "runs"]


@dataclass(frozen=True)
class Job:
    """One run to be done: an arm with a seed, at a point of the search."""

    arm: Arm
    seed: int
    point: Mapping[str, Any]


@dataclass
class Runner:
    """Trains what is missing of a study.

    Attributes:
        study: what to train.
        out: the folder of its rows; models are in ``runs`` there while they are needed.
        seconds: how long it may take; no run is started that would take longer, by the longest so far.
        device: as for `train`.
        commit: of the code, where there is no checkout to ask.
        say: told one line for each run.
        stop: says whether somebody asked to stop; no run is started then.
        errors: how many runs failed, by what was wrong with them.
        there, tried, left: how many runs were done before, are done or failed now, and there was no time for.
    """

    study: Study
    out: Path
    seconds: float = float("inf")
    device: str | None = None
    commit: str | None = None
    say: Callable[[str], object] = lambda line: None
    stop: Stop = field(default_factory=Stop)
    errors: Counter[str] = field(default_factory=Counter)
    there: int = 0
    tried: int = 0
    left: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _last_arm: str = ""

    @property
    def failed(self) -> int:
        """How many runs failed."""
        return self.errors.total()

    def tune(self, arms: str = "") -> None:
        """Train every point of the search for each arm, on nine tenths of the training data."""
        study, points = self.study, self.study.points()
        chosen = self._chosen(arms, tuning=True)
        jobs = [Job(arm, seed, point) for arm in chosen for point in points for seed in study.search_seeds]
        self._all(jobs, SEARCH, self._searched)

    def run(self, arms: str = "", seeds: tuple[int, ...] | None = None) -> None:
        """Train each arm with each seed on the whole training set, and evaluate it once, after the last epoch."""
        jobs = [
            Job(arm, seed, point)
            for arm in self._chosen(arms)
            for point in [best_point(self.study, arm, self.out)]
            for seed in seeds or self.study.seeds
        ]
        self._all(jobs, RESULTS, self._reported)

    def _chosen(self, pattern: str, *, tuning: bool = False) -> list[Arm]:
        """Give the arms that match, each after those whose models it needs; for tuning, those that stand for them."""
        try:
            wanted = [arm for arm in self.study.arms if re.search(pattern, arm.name)]
        except re.error as error:
            raise InvalidOption(f"--arms {pattern!r} is no regular expression: {error}") from error
        if not wanted:
            names = ", ".join(arm.name for arm in self.study.arms)
            raise InvalidOption(f"--arms {pattern!r} matches none of {names}")
        found: dict[str, Arm] = {}

        def add(arm: Arm) -> None:
            arm = self.study.arm(arm.tuned_as) if tuning and arm.tuned_as else arm
            for name in arm.needs:
                add(self.study.arm(name))
            found.setdefault(arm.name, arm)

        for arm in wanted:
            add(arm)
        return list(found.values())

    def _all(self, jobs: list[Job], file: str, one: Callable[[Job], Row]) -> None:
        done = finished(read_rows(self.out / file))
        here = [row.get("wall", 0.0) for row in done.values() if row["device"] == machine()["device"]]
        self._longest = max([self._longest, *here])
        for number, job in enumerate(jobs, 1):
            try:
                key = self._key(job)
            except InvalidOption:  # the search of an arm that it learns from is not finished
                key = ""
            if key in done:
                self.there += 1
                continue
            if not key or time.monotonic() - self._begun + self._longest > self.seconds:
                self.left += 1
                continue
            if self.stop.wanted:
                raise Interrupted("Stopped between two runs. Give the same command again to go on.")
            fields = plain(self.study.fields(job.arm, job.point))
            row = {"key": key, "arm": job.arm.name, "seed": job.seed, "point": plain(job.point), "fields": fields}
            begun = time.monotonic()
            try:
                row |= one(job)
            except Interrupted:
                raise
            except Exception as error:  # one run that fails must not take the others with it
                row["error"] = f"{type(error).__name__}: {error}".replace(str(self.out), "OUT")
                self.errors[row["error"]] += 1
            self.tried += 1
            row["wall"] = time.monotonic() - begun
            self._longest = max(self._longest, row["wall"])
            add_row(self.out / file, {**row, **machine(), "commit": self.commit or commit()})
            self.say(f"{number}/{len(jobs)}  {_line(row, self.errors[row.get('error', '')])}")

    # One run.

    def _searched(self, job: Job) -> Row:
        try:
            run, took = self._train(job, "search")
        except Diverged as error:
            return {"held": 0.0, "diverged": str(error).replace(str(self.out), "OUT")}
        self._clean(job, run)
        assert run.evaluation is not None
        return {"held": run.evaluation.score, "accuracy": dict(run.evaluation.accuracy), **took}

    def _reported(self, job: Job) -> Row:
        study, data = self.study, self.study.data()
        run, took = self._train(job, "runs")
        model, labels = run.load()
        cuda = self.device != "cpu" and torch.cuda.is_available()
        half = "bf16" if cuda else "fp32"
        found = evaluate(
            (model, labels), data.validation, device=self.device, dtype=half, seconds=study.timing, size=job.arm.size
        )
        seen = {} if study.look is None else study.look(run, Trained(model, labels, data))
        self._clean(job, run)
        return {
            **_evaluated(found),
            "correct": {name: pack(one.tolist()) for name, one in found.right.items()},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            **took,
            **seen,
        }

    def _train(self, job: Job, kind: Kind) -> tuple[Run, Row]:
        """Train: for the search with a part held out, else on all, watched on some of what is learned."""
        study, data = self.study, self.study.data()
        fields = study.fields(job.arm, job.point)
        given = {name: self._resolved(value, job.seed, kind) for name, value in fields.items()}
        once, watched = given["epochs"], kind == "runs" and study.watch > 0
        given |= {"data": data.train, "seed": job.seed, "device": self.device, "keep": 1}
        given["save_every"] = study.save_every or once
        given["validation"] = HELD if kind == "search" else data.watched(study.watch) if watched else None
        given["evaluate_every"] = study.watch_every if watched else once
        if job.arm.name != self._last_arm:  # each arm is compiled for its own shapes, whatever ran before it
            torch.compiler.reset()
        self._last_arm = job.arm.name
        folder = self._folder(job, kind)
        begun = study.save_every > 0 and any((folder / "checkpoints").glob("step-*"))
        with Stopwatch() as watch:
            run = train(**given, out=str(folder), resume=begun, overwrite=not begun)
        return run, watch.found(run.folder)

    def _resolved(self, value: Any, seed: int, kind: Kind) -> Any:
        """Give the value of a field; the model of another arm is trained if it is not there.

        What the search holds out is held out from the models that it uses, too.
        """
        if not isinstance(value, RunOf):
            return value
        other = self.study.arm(value.arm)
        job = Job(other, value.seed_for(seed), best_point(self.study, other, self.out))
        if not (self._folder(job, kind) / "last").is_dir():
            self._clean(job, self._train(job, kind)[0])
        return str(self._folder(job, kind) / "last")

    def _key(self, job: Job) -> str:
        return run_key(self.study, job.arm, job.seed, job.point, self.out)

    def _folder(self, job: Job, kind: Kind) -> Path:
        name = re.sub(r"[^\w.=%-]+", "-", job.arm.name).strip("-")
        return self.out / "runs" / kind / f"{name}-{job.seed}-{self._key(job)}"

    def _clean(self, job: Job, run: Run) -> None:
        """Throw away what no other run needs."""
        needed = any(job.arm.name in other.needs for other in self.study.arms)
        for path in [run.folder / "checkpoints", run.folder / "best"] if needed else [run.folder]:
            shutil.rmtree(path, ignore_errors=True)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def _evaluated(found: Evaluation) -> Row:
    """Take from an evaluation what a row keeps."""
    told = found.summary()
    kept = ("count", "accuracy", "loss", "calibration", "disagreement", "collapse", "outliers", "images_per_s")
    return {name: told[name] for name in kept}


def _line(row: Mapping[str, Any], failures: int) -> str:
    """Tell what became of a run; an error in full the first time, and then how many runs failed with it."""
    text = f"{row['arm']}  seed {row['seed']}"
    if row["point"]:
        text += "  " + " ".join(f"{name}={value}" for name, value in row["point"].items())
    if failures > 1:
        return f"{text}  the same error, {failures} runs so far"
    if problem := row.get("error") or row.get("diverged"):
        return f"{text}  {problem}"
    told = " ".join(f"{name} {100 * value:.2f} %" for name, value in row["accuracy"].items())
    memory = "" if row["peak_bytes"] is None else f"  {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{text}  {told}  {row['seconds']:.1f} s  {row['train_images_per_s']:,.0f}/s{memory}"
