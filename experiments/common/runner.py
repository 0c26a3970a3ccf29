"""Runner of a study: the search first, then every arm with every seed; finished runs are skipped.

A row is written when a run ends, so a study can be killed at any time and resumed. Each run is claimed while it is in
progress, so several processes can work on the same study.
"""

from __future__ import annotations

import gc
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.common.machine import Stopwatch, git_commit, machine_info
from experiments.common.results import (
    RESULTS,
    SEARCH,
    SearchUnfinished,
    add_row,
    best_point,
    failed,
    finished,
    pack,
    run_key,
)
from experiments.common.study import Arm, Row, RunOf, Study, TrainedModel, to_json
from vitrail._atomic_files import directory_lock
from vitrail._distributed import choose_device
from vitrail.errors import Diverged, InvalidOption
from vitrail.training import Evaluation, Run, evaluate, train
from vitrail.training.config import OPTIONS
from vitrail.training.interrupt import Interrupted, Stop

HELD_OUT = 0.1
"""Share of the training data that the search is evaluated on."""

POLL_SECONDS = 1.0
"""Seconds between two checks for the end of another process's run."""

Kind = Literal["search", "runs"]


@dataclass(frozen=True)
class Job:
    """One run: an arm with a seed, at a point of the search."""

    arm: Arm
    seed: int
    point: Mapping[str, Any]


@dataclass
class Runner:
    """Trains the missing runs of a study.

    Attributes:
        study: the study to train.
        out: folder of its rows; run directories are in ``runs`` there as long as they are needed.
        seconds: time limit; no run is started that would exceed it, judged by the longest run so far.
        device: as for `train`.
        commit: commit of the code, for machines without a checkout.
        log: called with one line for each run.
        stop: signals an interrupt; no run is started afterwards.
        errors: number of failed runs by error message.
        existing, tried, unfinished: number of runs found in the rows, executed now, and left for lack of time.
        failed_elsewhere: number of runs that failed in other processes meanwhile and were not retried.
    """

    study: Study
    out: Path
    seconds: float = float("inf")
    device: str | None = None
    commit: str | None = None
    log: Callable[[str], object] = lambda line: None
    stop: Stop = field(default_factory=Stop)
    errors: Counter[str] = field(default_factory=Counter)
    existing: int = 0
    tried: int = 0
    unfinished: int = 0
    failed_elsewhere: int = 0
    _start: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _last_arm: str = ""

    @property
    def failed(self) -> int:
        """Number of failed runs."""
        return self.errors.total()

    def search_and_run(
        self, arms: str = "", seeds: tuple[int, ...] | None = None, *, search_only: bool = False
    ) -> None:
        """Run the search of the matching arms and then, if it is complete, their reported runs."""
        runs = self.select(arms, seeds)
        self.search(arms)
        if search_only or self.errors or self.failed_elsewhere:
            return
        if self.unfinished:
            self.unfinished += len(runs)
        else:
            self.run(arms, seeds)

    def search(self, arms: str = "") -> None:
        """Train every point of the search for each arm, on nine tenths of the training data."""
        study, points = self.study, self.study.points()
        names = dict.fromkeys(arm.tuned_as or arm.name for arm in self._matching(arms))
        runs = [(study.arm(name), seed) for name in names for seed in study.search_seeds]
        jobs = [Job(arm, seed, point) for arm, seed in self._with_needs(runs, tuned=True) for point in points]
        self._process(jobs, "search", SEARCH, self._search_row)

    def run(self, arms: str = "", seeds: tuple[int, ...] | None = None) -> None:
        """Train each arm with each seed on the whole training set, and evaluate it once, after the last epoch."""
        jobs = [Job(arm, seed, best_point(self.study, arm, self.out)) for arm, seed in self.select(arms, seeds)]
        self._process(jobs, "runs", RESULTS, self._result_row)

    def select(self, arms: str = "", seeds: tuple[int, ...] | None = None) -> list[tuple[Arm, int]]:
        """Return the arms and seeds to run, each after the runs it needs."""
        known = self.study.seeds
        if not set(seeds or known) <= set(known):
            given, available = (", ".join(map(str, some)) for some in (seeds or (), known))
            raise InvalidOption(f"--seeds {given}: expected some of {available}, the seeds of {self.study.name}")
        return self._with_needs([(arm, seed) for arm in self._matching(arms) for seed in seeds or known])

    def _matching(self, pattern: str) -> list[Arm]:
        """Return the arms whose name matches a regular expression."""
        try:
            arms = [arm for arm in self.study.arms if re.search(pattern, arm.name)]
        except re.error as error:
            raise InvalidOption(f"--arms {pattern!r} is not a regular expression: {error}") from error
        if not arms:
            names = "; ".join(arm.name for arm in self.study.arms)
            raise InvalidOption(f"--arms {pattern!r} matches none of {names}")
        return arms

    def _with_needs(self, runs: list[tuple[Arm, int]], *, tuned: bool = False) -> list[tuple[Arm, int]]:
        """Add the runs whose models others need, before those; with ``tuned``, the arms whose search they use."""
        found: dict[tuple[str, int], tuple[Arm, int]] = {}

        def add(arm: Arm, seed: int) -> None:
            for value in arm.fields.values():
                if isinstance(value, RunOf):
                    other = self.study.arm(value.arm)
                    add(self.study.arm(other.tuned_as or other.name) if tuned else other, value.seed_for(seed))
            found.setdefault((arm.name, seed), (arm, seed))

        for arm, seed in runs:
            add(arm, seed)
        order = list(dict.fromkeys(name for name, _ in found))
        return sorted(found.values(), key=lambda one: order.index(one[0].name))

    def _process(self, jobs: list[Job], kind: Kind, file: str, make_row: Callable[[Job], Row]) -> None:
        """Execute the jobs that are not finished; runs claimed by other processes are waited for at the end.

        A run that failed before is retried, but not one that fails in another process meanwhile.
        """
        failed_before = len(failed(self.out / file))
        here = [row.get("wall", 0.0) for row in self._done(file).values() if row["device"] == machine_info()["device"]]
        self._longest = max([self._longest, *here])
        pending = list(enumerate(jobs, 1))
        while pending:
            claimed: list[tuple[int, Job]] = []
            for number, job in pending:
                try:
                    key = self._key(job)
                    if key in self._done(file):
                        self.existing += 1
                        continue
                    self._check()
                    late = time.monotonic() - self._start + self._longest > self.seconds
                    with self._claim(kind, key):
                        if late:
                            self.unfinished += 1
                        elif key in failed(self.out / file)[failed_before:]:
                            self.failed_elsewhere += 1
                        else:
                            self._execute(job, key, file, make_row, f"{number}/{len(jobs)}")
                except BlockingIOError:
                    if not late:
                        claimed.append((number, job))
                except SearchUnfinished:
                    if claimed:
                        claimed.append((number, job))
                    else:
                        self.unfinished += 1
            if len(claimed) == len(pending):
                self._wait()
            pending = claimed

    def _execute(self, job: Job, key: str, file: str, make_row: Callable[[Job], Row], number: str) -> None:
        """Execute one run, unless another process has just finished it, and add its row."""
        if key in self._done(file):
            self.existing += 1
            return
        fields = to_json(self.study.fields(job.arm, job.point))
        row = {"key": key, "arm": job.arm.name, "seed": job.seed, "point": to_json(job.point), "fields": fields}
        start = time.monotonic()
        try:
            row |= make_row(job)
        except Interrupted as interrupted:
            raise Interrupted("Interrupted during a run. Repeat the command to resume.") from interrupted
        except Exception as error:  # a failed run must not stop the others
            row["error"] = f"{type(error).__name__}: {error}".replace(str(self.out), "OUT")
            self.errors[row["error"]] += 1
        self.tried += 1
        row["wall"] = time.monotonic() - start
        self._longest = max(self._longest, row["wall"])
        add_row(self.out / file, {**row, **machine_info(), "commit": self.commit or git_commit()})
        self.log(f"{number}  {_log_line(row, self.errors[row.get('error', '')])}")

    def _done(self, file: str) -> dict[str, Mapping[str, Any]]:
        return finished(self.out / file)

    def _check(self) -> None:
        """Raise errors that would affect all runs (device, data), and `Interrupted` after an interrupt."""
        OPTIONS["device"].check(self.device)
        choose_device(self.device)
        self.study.data()
        if self.stop.wanted:
            raise Interrupted("Interrupted between two runs. Repeat the command to resume.")

    # Other processes.

    @contextmanager
    def _claim(self, kind: Kind, key: str) -> Iterator[None]:
        """Lock a run for this process; raise ``BlockingIOError`` if another one holds it."""
        folder = self.out / "runs" / "claimed" / f"{kind}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        with directory_lock(folder):
            yield

    def _claim_when_free(self, kind: Kind, key: str) -> ExitStack:
        """Wait until no other process holds a run, then lock it; return a context manager that releases it."""
        stack = ExitStack()
        while True:
            try:
                stack.enter_context(self._claim(kind, key))
            except BlockingIOError:
                self._wait()
            else:
                return stack

    def _wait(self) -> None:
        self._check()
        time.sleep(POLL_SECONDS)

    # One run.

    def _search_row(self, job: Job) -> Row:
        try:
            run, measured = self._train(job, "search")
        except Diverged as error:
            return {"held": 0.0, "diverged": str(error).replace(str(self.out), "OUT")}
        self._clean(job, run)
        assert run.evaluation is not None
        return {"held": run.evaluation.score, "accuracy": dict(run.evaluation.accuracy), **measured}

    def _result_row(self, job: Job) -> Row:
        study, data = self.study, self.study.data()
        run, measured = self._train(job, "runs")
        model, labels = run.load()
        cuda = self.device != "cpu" and torch.cuda.is_available()
        dtype = "bf16" if cuda else "fp32"
        found = evaluate(
            (model, labels), data.validation, device=self.device, dtype=dtype, seconds=0, size=job.arm.size
        )
        extra = {} if study.measure is None else study.measure(run, TrainedModel(model, labels, data))
        self._clean(job, run)
        return {
            **_evaluation_fields(found),
            "correct": {name: pack(one.tolist()) for name, one in found.right.items()},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            **measured,
            **extra,
        }

    def _train(self, job: Job, kind: Kind) -> tuple[Run, Row]:
        """Train: for the search with a held-out share, else on all data, monitored on some training images."""
        study, data = self.study, self.study.data()
        fields = study.fields(job.arm, job.point)
        given = {name: self._resolve(value, job.seed, kind) for name, value in fields.items()}
        epochs, monitored = given["epochs"], kind == "runs" and study.monitor > 0
        given |= {"data": data.train, "seed": job.seed, "device": self.device, "keep": 1}
        given["save_every"] = study.save_every or epochs
        given["validation"] = HELD_OUT if kind == "search" else data.monitored(study.monitor) if monitored else None
        given["evaluate_every"] = study.monitor_every if monitored else epochs
        if job.arm.name != self._last_arm:  # each arm is compiled for its own shapes, whatever ran before it
            torch.compiler.reset()
        self._last_arm = job.arm.name
        folder = self._run_directory(job, kind)
        resume = study.save_every > 0 and any((folder / "checkpoints").glob("step-*"))
        with Stopwatch() as watch:
            run = train(**given, out=str(folder), resume=resume, overwrite=not resume)
        return run, watch.measured(run.folder)

    def _resolve(self, value: Any, seed: int, kind: Kind) -> Any:
        """Return the value of an option; a model of another arm is trained if it does not exist.

        Data held out by the search is held out from the models it uses, too.
        """
        if not isinstance(value, RunOf):
            return value
        other = self.study.arm(value.arm)
        job = Job(other, value.seed_for(seed), best_point(self.study, other, self.out))
        with self._claim_when_free(kind, self._key(job)):
            if not (self._run_directory(job, kind) / "last").is_dir():
                self._clean(job, self._train(job, kind)[0])
        return str(self._run_directory(job, kind) / "last")

    def _key(self, job: Job) -> str:
        return run_key(self.study, job.arm, job.seed, job.point, self.out)

    def _run_directory(self, job: Job, kind: Kind) -> Path:
        name = re.sub(r"[^\w.=%-]+", "-", job.arm.name).strip("-")
        return self.out / "runs" / kind / f"{name}-{job.seed}-{self._key(job)}"

    def _clean(self, job: Job, run: Run) -> None:
        """Delete what no other run needs."""
        needed = any(job.arm.name in other.needs for other in self.study.arms)
        for path in [run.folder / "checkpoints", run.folder / "best"] if needed else [run.folder]:
            shutil.rmtree(path, ignore_errors=True)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def _evaluation_fields(found: Evaluation) -> Row:
    """Return the part of an evaluation that a row keeps."""
    summary = found.summary()
    kept = ("count", "accuracy", "loss", "calibration", "disagreement", "collapse", "outliers", "images_per_s")
    return {name: summary[name] for name in kept}


def _log_line(row: Mapping[str, Any], failures: int) -> str:
    """Summarize a run in one line; a repeated error is given as a count."""
    text = f"{row['arm']}  seed {row['seed']}"
    if row["point"]:
        text += "  " + " ".join(f"{name}={value}" for name, value in row["point"].items())
    if failures > 1:
        return f"{text}  the same error, {failures} runs so far"
    if problem := row.get("error") or row.get("diverged"):
        return f"{text}  {problem}"
    accuracy = " ".join(f"{name} {100 * value:.2f} %" for name, value in row["accuracy"].items())
    memory = "" if row["peak_bytes"] is None else f"  {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{text}  {accuracy}  {row['seconds']:.1f} s  {row['train_images_per_s']:,.0f} images/s{memory}"
