"""Training a study: the search first, then every arm with every seed; what is done already is not done again.

A row is written when a run ends. So a study may be killed at any time, and goes on where it was. A run is claimed while
it is done, so that several processes may be given the same study: each takes what no other one is at.
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

from experiments.common.choosing import Unready, best_point, run_key
from experiments.common.machine import Stopwatch, commit, machine
from experiments.common.rows import RESULTS, SEARCH, add_row, failed, finished, pack
from experiments.common.study import Arm, Row, RunOf, Study, Trained, plain
from vitrail._atomic_files import held
from vitrail._distributed import place
from vitrail.errors import Diverged, InvalidOption
from vitrail.training import Evaluation, Run, evaluate, train
from vitrail.training.config import OPTIONS
from vitrail.training.interrupt import Interrupted, Stop

HELD = 0.1
"""The share of the training data that the search is evaluated on; the validation set has no part in it."""

PATIENCE = 1.0
"""Seconds between two looks at what another process is doing."""

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
        elsewhere: how many failed meanwhile by other processes, and were not tried again.
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
    elsewhere: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _last_arm: str = ""

    @property
    def failed(self) -> int:
        """How many runs failed."""
        return self.errors.total()

    def do(self, arms: str = "", seeds: tuple[int, ...] | None = None, *, only_tune: bool = False) -> None:
        """Tune what matches, and unless that is all, or went wrong, run it; what there is no time for is counted."""
        wanted = self.wanted(arms, seeds)
        self.tune(arms)
        if only_tune or self.errors or self.elsewhere:
            return
        if self.left:
            self.left += len(wanted)
        else:
            self.run(arms, seeds)

    def tune(self, arms: str = "") -> None:
        """Train every point of the search for each arm, on nine tenths of the training data."""
        study, points = self.study, self.study.points()
        names = dict.fromkeys(arm.tuned_as or arm.name for arm in self._matching(arms))
        tuned = self._with_needs([(study.arm(name), seed) for name in names for seed in study.search_seeds], tuned=True)
        self._all([Job(arm, seed, point) for arm, seed in tuned for point in points], "search", SEARCH, self._searched)

    def run(self, arms: str = "", seeds: tuple[int, ...] | None = None) -> None:
        """Train each arm with each seed on the whole training set, and evaluate it once, after the last epoch."""
        jobs = [Job(arm, seed, best_point(self.study, arm, self.out)) for arm, seed in self.wanted(arms, seeds)]
        self._all(jobs, "runs", RESULTS, self._reported)

    def wanted(self, arms: str = "", seeds: tuple[int, ...] | None = None) -> list[tuple[Arm, int]]:
        """Give the runs that are asked for, and before each those that it needs."""
        known = self.study.seeds
        if not set(seeds or known) <= set(known):
            asked, has = (", ".join(map(str, some)) for some in (seeds or (), known))
            raise InvalidOption(f"--seeds {asked}: expected some of {has}, which {self.study.name} has")
        return self._with_needs([(arm, seed) for arm in self._matching(arms) for seed in seeds or known])

    def _matching(self, pattern: str) -> list[Arm]:
        """Give the arms that match."""
        try:
            wanted = [arm for arm in self.study.arms if re.search(pattern, arm.name)]
        except re.error as error:
            raise InvalidOption(f"--arms {pattern!r} is no regular expression: {error}") from error
        if not wanted:
            names = "; ".join(arm.name for arm in self.study.arms)
            raise InvalidOption(f"--arms {pattern!r} matches none of {names}")
        return wanted

    def _with_needs(self, wanted: list[tuple[Arm, int]], *, tuned: bool = False) -> list[tuple[Arm, int]]:
        """Add the runs whose models others need, each before those; of what is tuned, those that are tuned, too."""
        found: dict[tuple[str, int], tuple[Arm, int]] = {}

        def add(arm: Arm, seed: int) -> None:
            for value in arm.fields.values():
                if isinstance(value, RunOf):
                    other = self.study.arm(value.arm)
                    add(self.study.arm(other.tuned_as or other.name) if tuned else other, value.seed_for(seed))
            found.setdefault((arm.name, seed), (arm, seed))

        for arm, seed in wanted:
            add(arm, seed)
        order = list(dict.fromkeys(name for name, _ in found))
        return sorted(found.values(), key=lambda one: order.index(one[0].name))

    def _all(self, jobs: list[Job], kind: Kind, file: str, one: Callable[[Job], Row]) -> None:
        """Do what is not done yet; what another process is at is waited for, when all else is done.

        A run that failed before is tried again, but not what fails by another process meanwhile: that one tells of it.
        """
        before = len(failed(self.out / file))
        here = [row.get("wall", 0.0) for row in self._done(file).values() if row["device"] == machine()["device"]]
        self._longest = max([self._longest, *here])
        waiting = list(enumerate(jobs, 1))
        while waiting:
            others: list[tuple[int, Job]] = []
            for number, job in waiting:
                try:
                    key = self._key(job)
                    if key in self._done(file):
                        self.there += 1
                        continue
                    self._check()
                    late = time.monotonic() - self._begun + self._longest > self.seconds
                    with self._claimed(kind, key):
                        if late:
                            self.left += 1
                        elif key in failed(self.out / file)[before:]:
                            self.elsewhere += 1
                        else:
                            self._do(job, key, file, one, f"{number}/{len(jobs)}")
                except BlockingIOError:
                    if not late:
                        others.append((number, job))
                except Unready:
                    if others:
                        others.append((number, job))
                    else:
                        self.left += 1
            if len(others) == len(waiting):
                self._wait()
            waiting = others

    def _do(self, job: Job, key: str, file: str, one: Callable[[Job], Row], number: str) -> None:
        """Do one run, unless another process has just done it, and add its row."""
        if key in self._done(file):
            self.there += 1
            return
        fields = plain(self.study.fields(job.arm, job.point))
        row = {"key": key, "arm": job.arm.name, "seed": job.seed, "point": plain(job.point), "fields": fields}
        begun = time.monotonic()
        try:
            row |= one(job)
        except Interrupted as stopped:
            raise Interrupted("Stopped in the middle of a run. Give the same command again to go on.") from stopped
        except Exception as error:  # one run that fails must not take the others with it
            row["error"] = f"{type(error).__name__}: {error}".replace(str(self.out), "OUT")
            self.errors[row["error"]] += 1
        self.tried += 1
        row["wall"] = time.monotonic() - begun
        self._longest = max(self._longest, row["wall"])
        add_row(self.out / file, {**row, **machine(), "commit": self.commit or commit()})
        self.say(f"{number}  {_line(row, self.errors[row.get('error', '')])}")

    def _done(self, file: str) -> dict[str, Mapping[str, Any]]:
        return finished(self.out / file)

    def _check(self) -> None:
        """See that nothing is wrong for all runs, which would be no failure of one, and that nobody wants to stop."""
        OPTIONS["device"].check(self.device)
        place(self.device)
        self.study.data()
        if self.stop.wanted:
            raise Interrupted("Stopped between two runs. Give the same command again to go on.")

    # Other processes.

    @contextmanager
    def _claimed(self, kind: Kind, key: str) -> Iterator[None]:
        """Keep a run to this process; ``BlockingIOError`` where another one is at it."""
        folder = self.out / "runs" / "claimed" / f"{kind}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder):
            yield

    def _patiently(self, kind: Kind, key: str) -> ExitStack:
        """Keep a run to this process as soon as no other one is at it, until the end of a ``with`` block."""
        stack = ExitStack()
        while True:
            try:
                stack.enter_context(self._claimed(kind, key))
            except BlockingIOError:
                self._wait()
            else:
                return stack

    def _wait(self) -> None:
        self._check()
        time.sleep(PATIENCE)

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
        found = evaluate((model, labels), data.validation, device=self.device, dtype=half, seconds=0, size=job.arm.size)
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
        with self._patiently(kind, self._key(job)):
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
