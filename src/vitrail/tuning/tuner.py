"""``vitrail.tune``: the largest merge within a tolerance, or the best within a budget, on the user's own images."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._wording import counted
from vitrail.adapters import Found, find
from vitrail.analysis.statistics import Interval, bootstrap, ratio_of_medians, split_images, wilson
from vitrail.data.batches import open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.merging import Method, as_method
from vitrail.merging.methods.dynamic import Calibrated
from vitrail.runtime.checks import refuse_merged
from vitrail.surgery import merge
from vitrail.surgery.recording import input_axes
from vitrail.tuning.quality import Quality, Tolerance, as_quality, is_positive
from vitrail.tuning.result import Candidate, Tuning
from vitrail.tuning.search import SEARCHES, Problem
from vitrail.tuning.trials import Counts, Trials

OnProgress = Callable[[str, int, int | None], object]

PILOT = 0.75
"""Share of the FLOPs at which methods are compared before the best is tuned."""

FLOOR = 0.2
"""Share of the FLOPs below which no schedule is sought."""

EVALUATIONS = 80
"""Evaluations that a search should be able to afford; it sees fewer images where they would take too long."""

FEWEST = 16
"""Fewest images that a search sees."""

BEYOND = 2
"""Schedules tried beyond the first that misses a tolerance, since qualities on few images are uneven."""

TIMED = 8
"""Passes over a batch that timing one setting takes at least."""

TIMING = 2.0
"""Seconds for timing the result."""


@checked
def tune(
    model: nn.Module,
    images: Any,
    within: Any = None,
    *,
    gflops: float | None = None,
    latency_ms: float | None = None,
    quality: Any = "agreement",
    method: str | Mapping[str, Any] | Method | Sequence[Any] = "tome",
    search: str = "greedy",
    labels: Any = None,
    limit: int = 500,
    batch_size: int = 32,
    held_out: float = 0.5,
    seconds: float = 600.0,
    seed: int = 0,
    proportional: bool = True,
    on_progress: OnProgress | None = None,
) -> Tuning:
    """Find the largest merge within a tolerance, or the best merge within a budget.

    Without labels, a merged model is compared with the unmerged one. A search proposes schedules on one part of the
    images, the other part (held out) decides and gives the confidence interval. The model is left unmerged. Interrupt
    it (Ctrl-C) to get the best setting found so far; what was not measured by then is None. An interrupt before any
    setting is known is raised.

    >>> tuning = vitrail.tune(model, "photos/", within="agreement 0.99")    # doctest: +SKIP
    >>> merging = tuning.apply(model)                                       # doctest: +SKIP

    Args:
        model: a supported model, not merged.
        images: anything that ``vitrail.data.open_dataset`` opens, preprocessed images (B, C, H, W), or batches of them.
        within: a tolerance: ``"agreement 0.99"`` (share of images with the same top-1 class, at least), ``"kl 0.01"``
            (at most), ``"cosine 0.98"`` of the outputs (at least), ``"dense_error 0.1"`` (relative error of the tokens
            after the last block, at most), ``"accuracy_loss 0.002"`` with labels (at most), or ``(score, 0.01)`` with a
            function from outputs and labels to one score per image, and the largest mean loss of it.
        gflops: instead of a tolerance, a budget for one image in 10⁹ multiply-adds.
        latency_ms: instead, a budget for one batch of ``batch_size`` images, measured on this machine.
        quality: what to maximize within a budget; named as in ``within``.
        method: a merging method, or several to choose from.
        search: ``"greedy"``, ``"evolution"`` or ``"policy"``.
        labels: label column of a dataset, or labels of a tensor's images, where the quality needs them.
        limit: most images to use.
        batch_size: images per batch, also for measured times.
        held_out: share of the images that the search does not see.
        seconds: how long it may take, the reading of the images included; on a slow machine fewer images are used.
        seed: seed of the split and of the search.
        proportional: as for ``vitrail.merge``.
        on_progress: called with a stage, the number of steps done, and their total.
    """
    began = time.monotonic()
    goal = Goal.parse(within, gflops, latency_ms, quality)
    methods = _methods(method)
    if search not in SEARCHES:
        raise InvalidOption(f"search is one of {', '.join(SEARCHES)}; got {search!r}")
    if not is_positive(seconds) or not 0 < held_out < 1:
        raise InvalidOption(
            f"seconds is a number above 0 and held_out a share between 0 and 1; got {seconds!r} and {held_out!r}"
        )
    refuse_merged(model)
    found = find(model)
    for one in methods:  # a method that this model cannot serve fails before any image is read
        _try(model, one, proportional)
    tell = on_progress or (lambda stage, done, total: None)
    loaded, known = _load(found, images, labels, limit, batch_size, goal.quality.labeled)
    trials = Trials(model, found, loaded, known, goal.quality.dense, proportional=proportional)
    if trials.count < 4:
        raise UnsupportedInput(f"tune needs 4 samples or more, better some hundreds; got {trials.count}")
    start = time.monotonic()
    until = began + seconds

    def on_batch(done: int) -> None:
        tell("unmerged model", done, len(loaded))

    with trials.open(on_batch, 2 * FEWEST, start + 0.15 * (until - start), seed):
        if goal.quality.logits and trials.reference[0].shape[-1] < 2:
            raise InvalidOption(
                f"{goal.quality.name} compares classes, and this model has none; use 'cosine 0.98' or 'dense_error 0.1'"
            )
        if goal.quality.labeled and len(trials.tasks) > 1:
            raise InvalidOption(f"{goal.quality.name} is for models of one task; use 'agreement 0.99' or 'kl 0.02'")
        per_image = (time.monotonic() - start) / trials.count
        split = split_images(trials.count, test_share=held_out, seed=seed)
        left = max(0.0, until - time.monotonic())
        # some 12 passes over the tuning images and 4 over the held-out ones, besides the search
        tuning, deciding = (
            part[: max(FEWEST, int(share * left / per_image / passes))]
            for part, share, passes in ((split.train, 0.35, 12), (split.test, 0.2, 4))
        )
        tuner = Tuner(trials, goal, tuning, deciding, per_image, began, until, seed, batch_size, tell)
        return tuner.run(methods, search)


@dataclass(frozen=True)
class Goal:
    """A quality with its tolerance, or to be maximized within a budget."""

    quality: Quality
    bound: float | None = None
    gflops: float | None = None
    latency_ms: float | None = None

    @classmethod
    def parse(cls, within: Any, gflops: float | None, latency_ms: float | None, quality: Any) -> Goal:
        """Check a user's options: exactly one of a tolerance and the budgets."""
        given = {"within": within, "gflops": gflops, "latency_ms": latency_ms}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise InvalidOption(
                f"give exactly one of within=, gflops= or latency_ms=; got {' and '.join(named) or 'none of them'}"
            )
        if within is not None:
            tolerance = Tolerance.parse(within)
            return cls(tolerance.quality, tolerance.bound)
        if not is_positive(given[named[0]]):
            raise InvalidOption(f"{named[0]} is a budget above 0; got {given[named[0]]!r}")
        return cls(as_quality(quality), None, gflops, latency_ms)


@dataclass
class Path:
    """Schedules of one family, more and more merging, with what is known of them."""

    family: str
    method: Any
    schedules: list[Counts]


@dataclass(frozen=True)
class Choice:
    """A schedule of a path, and its quality on each held-out image, where that was measured."""

    path: Path
    index: int
    values: Tensor | None = None

    @property
    def counts(self) -> Counts:
        """Merges per layer."""
        return self.path.schedules[self.index]


@dataclass
class Tuner:
    """One tuning in progress.

    Attributes:
        chosen: of each path the best schedule known, by the tuning images.
        decided: schedules that meet the goal on the held-out images.
        out_of_time: whether a stage ended because of the time limit.
    """

    trials: Trials
    goal: Goal
    tuning: Tensor
    deciding: Tensor
    per_image: float
    began: float
    until: float
    seed: int
    batch_size: int
    tell: OnProgress
    values: dict[tuple[int, Counts], Candidate] = field(default_factory=dict)
    chosen: dict[tuple[str, int], Choice] = field(default_factory=dict)
    decided: list[Choice] = field(default_factory=list)
    interrupted: bool = False
    out_of_time: bool = False

    def run(self, methods: Sequence[Any], search: str) -> Tuning:
        """Search, decide on the held-out images, and measure; an interrupt ends the present stage."""
        with self._interruptible():
            self._find(methods, search)
        self._check_found(self.chosen.values())
        times: tuple[list[float], list[float]] | None = None
        with self._interruptible():
            self._decide()
            if any(map(self._is_result, self.decided)):
                times = self._time(self._best())
        if self.decided or not self.interrupted:
            self._check_found(self.decided)
        return self._result(self._best(), times)

    def _find(self, methods: Sequence[Any], search: str) -> None:
        """Choose schedules by the tuning images: the likeliest method's constant ones and ToMe's, then those of the
        search, then the other methods' constant ones where there is time.
        """
        paths = self._reaching([Path("constant", one, self._constant(one)) for one in methods])
        for path in paths if self.goal.gflops is not None else ():
            self._choose(path)
        winner = self._compare_methods(paths)
        usual = [path for path in paths if path is not winner and as_method(path.method).config == "tome"]
        self.chosen = {}
        for path in (winner, *usual):
            self._choose(path)
        start = self.chosen.get(_key(winner))
        if start is not None:
            target = max(FLOOR, 0.95 * self._cost(winner.method, start.counts))
            found = self._search(winner.method, search, target)
            if found is not None:
                self._choose(Path(search, winner.method, found))
        for path in paths:
            if path is not winner and path not in usual and not self.interrupted:
                if self.goal.gflops is None and self._is_late:
                    self.out_of_time = not self.chosen
                    return
                self._choose(path)

    def _compare_methods(self, paths: Sequence[Path]) -> Path:
        """Return the path of the method that moves the outputs least, of those that there is time to compare."""
        if len(paths) == 1:
            return paths[0]
        distances: list[tuple[float, Path]] = []
        for path in paths:
            if distances and self._is_late:
                self.out_of_time = True
                break
            distances.append((self._pilot(path), path))
        return min(distances, key=lambda one: one[0])[1]

    def _reaching(self, paths: list[Path]) -> list[Path]:
        """Return the paths that reach a budget in FLOPs; raise where none does."""
        found = [path for path in paths if self.goal.gflops is None or self._within_flops(path) is not None]
        if not found:
            costs = (self.trials.flops(path.method, counts) for path in paths for counts in path.schedules)
            raise InvalidOption(
                f"gflops={self.goal.gflops:g} cannot be reached: the most merging that tune tries leaves "
                f"{min(costs) / 1e9:.4g} GFLOPs of {self._unmerged_flops / 1e9:.4g}; raise the budget to more than that"
            )
        return found

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End the work inside when the user interrupts it."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def _constant(self, method: Any) -> list[Counts]:
        patches = self._patches
        depth = len(self.trials.found.blocks)
        counts = [self.trials.cap(method, [r] * depth) for r in range(patches // 2 + 1)]
        return [one for one in dict.fromkeys(counts) if self._cost(method, one) >= FLOOR]

    @cached_property
    def _patches(self) -> int:
        adapter, trunk = self.trials.found.adapter, self.trials.found.trunk
        return adapter.layout(trunk, self.trials._size).num_patches

    def _cost(self, method: Any, counts: Counts) -> float:
        return self.trials.flops(method, counts) / self._unmerged_flops

    @cached_property
    def _unmerged_flops(self) -> int:
        merging = self.trials.apply(self.trials.method or "tome", [0] * len(self.trials.found.blocks))
        return merging.flops(self.trials._size, merged=False)

    def _pilot(self, path: Path) -> float:
        """Return the distance from the unmerged model at the pilot's cost."""
        affordable = [counts for counts in path.schedules if self._cost(path.method, counts) <= PILOT]
        counts = affordable[0] if affordable else path.schedules[-1]
        return self.trials.distance(self.goal.quality, path.method, counts, self._few())

    def _few(self) -> Tensor:
        """Return as many of the tuning images as a search can afford to see in each evaluation."""
        spend = self._left * 0.6 / EVALUATIONS
        count = int(max(FEWEST, min(len(self.tuning), spend / max(self.per_image, 1e-9))))
        return self.tuning[: min(count, len(self.tuning))]

    def _search(self, method: Any, name: str, target: float) -> list[Counts] | None:
        """Return the best path of a search; None if there was no time for one."""
        few = self._few()
        spent = time.monotonic()
        if self._is_late:
            return None

        def loss(counts: Counts) -> float:
            self.tell("search", problem.evaluations, EVALUATIONS)
            return self.trials.distance(self.goal.quality, method, counts, few)

        problem = Problem(
            depth=len(self.trials.found.blocks),
            patches=self._patches,
            cap=lambda counts: self.trials.cap(method, counts),
            cost=lambda counts: self._cost(method, tuple(counts)),
            loss=loss,
            target=target,
            floor=max(FLOOR, target - 0.25),
            until=spent + 0.7 * self._left,
            seed=self.seed,
        )
        last: list[Counts] | None = None
        with self._interruptible():
            for path in SEARCHES[name](problem):
                last = path
        return last

    def _choose(self, path: Path) -> None:
        """Keep the schedule that meets the goal on the tuning images, and until that is known the best so far.

        Within a tolerance it is the one with the most merging, within a budget the one with the least.
        """
        last = len(path.schedules) - 1
        if self.goal.gflops is not None:
            index = self._within_flops(path)
            if index is not None:
                self._keep(path, index)
        elif self.goal.latency_ms is not None:
            self._bisect(path, range(last, -1, -1), -1, self._is_fast)
        else:
            self._keep(path, 0)
            low = self._bisect(path, range(last + 1), 0, self._is_close)
            for index in range(low + 2, min(low + 2 + BEYOND, last + 1)):
                if not self._is_late and self._is_close(path, index):
                    self._keep(path, index)

    def _bisect(self, path: Path, order: Sequence[int], low: int, fits: Callable[[Path, int], bool]) -> int:
        """Keep the furthest schedule in an order that fits, and return its place; ``low`` fits, or is −1."""
        high = len(order)
        while high - low > 1:
            if self._is_late:
                self.out_of_time = True
                break
            middle = (low + high) // 2
            if fits(path, order[middle]):
                low = middle
                self._keep(path, order[low])
            else:
                high = middle
        return low

    def _keep(self, path: Path, index: int) -> None:
        self.chosen[_key(path)] = Choice(path, index)

    @property
    def _left(self) -> float:
        """Seconds left to search; the others are for the held-out images and for timing."""
        reserve = self.per_image * (3 * len(self.deciding) + 2 * TIMED * self._timed) + 1.5 * TIMING
        return max(0.0, self.until - min(reserve, 0.5 * (self.until - self.began)) - time.monotonic())

    @property
    def _is_late(self) -> bool:
        """Whether there is no time for another pass over the tuning images."""
        return self._left <= self.per_image * len(self.tuning)

    @property
    def _timed(self) -> int:
        """Images in the batch that is timed: on slow machines fewer than requested, unless its latency is the goal."""
        if self.goal.latency_ms is not None:
            return self.batch_size
        affordable = int(0.15 * (self.until - self.began) / (2 * TIMED * self.per_image))
        return max(1, min(self.batch_size, affordable))

    def _within_flops(self, path: Path) -> int | None:
        """Return the least merging whose FLOPs are within the budget; None if there is none."""
        assert self.goal.gflops is not None
        costs = (self.trials.flops(path.method, counts) for counts in path.schedules)
        return next((index for index, cost in enumerate(costs) if cost <= self.goal.gflops * 1e9), None)

    def _is_fast(self, path: Path, index: int) -> bool:
        """Return whether the measured latency of a schedule is within the budget."""
        batch = torch.cat(self.trials.images)[: self.batch_size]
        (seconds,) = self.trials.times([(path.method, path.schedules[index])], batch, 0.5)
        return 1e3 * median(seconds) <= float(self.goal.latency_ms or 0)

    def _is_close(self, path: Path, index: int) -> bool:
        """Return whether the quality of a schedule is within the tolerance on the tuning images."""
        return self._meets(self._value(path, index))

    def _meets(self, value: float) -> bool:
        return self.goal.bound is None or self.goal.quality.meets(value, self.goal.bound)

    def _value(self, path: Path, index: int) -> float:
        """Return the quality of a schedule, mean over the tuning images."""
        counts = path.schedules[index]
        key = (id(path.method), counts)
        if key not in self.values:
            self.tell("tuning samples", len(self.values), None)
            start = time.monotonic()
            value = float(self.trials.compare(self.goal.quality, path.method, counts, self.tuning).mean())
            self.per_image = (time.monotonic() - start) / len(self.tuning)
            flops = self.trials.flops(path.method, counts)
            self.values[key] = Candidate(path.family, as_method(path.method).config, counts, flops, value)
        return self.values[key].value

    def _decide(self) -> None:
        """Measure the choices on the held-out images; where one misses the tolerance there, merge less.

        Within a tolerance the choice with the fewest FLOPs is always measured next, so that none that merges more than
        the result could have met it.
        """
        pending = [(choice, choice.index + 1) for choice in self.chosen.values()]
        turn = 0
        while pending:
            if self.goal.bound is not None:
                pending.sort(key=lambda one: self._rank(one[0]))
            choice, missed = pending.pop(0)
            path, index = choice.path, choice.index
            if self._is_beaten(choice):
                continue
            if turn and self._is_over:
                self.out_of_time = True
                break
            self.tell("held-out samples", turn, turn + len(pending) + 1)
            turn += 1
            values = self.trials.compare(self.goal.quality, path.method, choice.counts, self.deciding)
            if self._meets(float(values.mean())) or index == 0:
                self.decided.append(Choice(path, index, values))
                if missed - index > 1:
                    pending.append((Choice(path, (index + missed) // 2), missed))
            else:
                known = [one.index for one in self.decided if one.path is path]
                less = (max(known) + index) // 2 if known else index - max(1, index // 10)
                if less not in known:
                    pending.append((Choice(path, less), index))
        if not self._is_over:
            self._value(self._best().path, self._best().index)

    @property
    def _is_over(self) -> bool:
        """Whether there is no time for another pass over the held-out images and for timing."""
        rest = self.per_image * (len(self.deciding) + 2 * TIMED * self._timed) + TIMING
        return time.monotonic() + rest >= self.until

    def _is_beaten(self, choice: Choice) -> bool:
        """Return whether a decided choice merges more than this one, so that its quality does not matter."""
        return self.goal.bound is not None and any(self._rank(one) <= self._rank(choice) for one in self.decided)

    def _rank(self, choice: Choice) -> float:
        """Return a number that is lowest for the best choice: FLOPs within a tolerance, or quality within a budget."""
        if self.goal.bound is not None:
            return self._cost(choice.path.method, choice.counts)
        if choice.values is None:
            return 0.0
        mean = float(choice.values.mean())
        return -mean if self.goal.quality.higher else mean

    def _best(self) -> Choice:
        """Return the best choice by the held-out images; by the tuning images where an interrupt left these out."""
        if self.decided:
            return min(self.decided, key=lambda one: (self._rank(one), self._cost(one.path.method, one.counts)))
        return min(self.chosen.values(), key=lambda one: (self._rank(one), one.path.family == "constant"))

    def _is_result(self, choice: Choice) -> bool:
        """Return whether a choice is worth returning: within a tolerance, one that merges."""
        return self.goal.bound is None or any(choice.counts)

    def _check_found(self, choices: Iterable[Choice]) -> None:
        """Raise unless one of these choices merges within the goal."""
        if any(map(self._is_result, choices)):
            return
        if self.interrupted:
            raise KeyboardInterrupt
        took, goal = time.monotonic() - self.began, self.goal
        bound = f"{goal.quality.name} {goal.bound:g}" if goal.bound is not None else f"latency_ms={goal.latency_ms:g}"
        if self.out_of_time:
            raise InvalidOption(
                f"time ran out after {took:.3g} s, before a merge within {bound} was found; raise seconds=, or pass "
                "fewer or smaller images (limit=)"
            )
        if goal.bound is None:
            raise InvalidOption(
                f"{bound} cannot be reached for batches of {self.batch_size} images: the most merging that tune tries "
                "takes longer; raise the budget, or use smaller batches"
            )
        least = min((one for one in self.values.values() if any(one.r)), key=lambda one: sum(one.r), default=None)
        reached = "" if least is None else f": merging {sum(least.r)} patches gives {least.value:.4g}"
        raise InvalidOption(
            f"no merge stays within {bound} on these images{reached}; loosen the tolerance, or leave the model unmerged"
        )

    def _time(self, choice: Choice) -> tuple[list[float], list[float]]:
        """Time the unmerged and the tuned model; return the seconds of each round."""
        self.tell("timing", 0, 1)
        batch = torch.cat(self.trials.images)[: self._timed]
        seconds = max(0.2, min(TIMING, self.until - time.monotonic()))
        unmerged, merged = self.trials.times([None, (choice.path.method, choice.counts)], batch, seconds)
        return unmerged, merged

    def _result(self, choice: Choice, times: tuple[list[float], list[float]] | None) -> Tuning:
        path, values = choice.path, choice.values
        merging = self.trials.apply(path.method, choice.counts)
        config, flops = merging.config, merging.flops(self.trials._size)
        return Tuning(
            config=config,
            family=path.family,
            quality=self.goal.quality.name,
            bound=self.goal.bound,
            value=None if values is None else float(values.mean()),
            interval=None if values is None else _interval(self.goal.quality, values),
            flops=flops,
            flops_unmerged=merging.flops(self.trials._size, merged=False),
            speedup=None if times is None else median(times[0]) / median(times[1]),
            latency_ms=None if times is None else 1e3 * median(times[1]),
            batch=min(self._timed, self.trials.count),
            tuned_on=len(self.tuning),
            held_out=0 if values is None else len(self.deciding),
            curve=tuple(sorted(self.values.values(), key=lambda one: -one.flops)),
            seconds=time.monotonic() - self.began,
            interrupted=self.interrupted,
            device=str(next(self.trials.model.parameters()).device),
            speedup_interval=None if times is None else ratio_of_medians(*times),
        )


def _key(path: Path) -> tuple[str, int]:
    return path.family, id(path.method)


def _interval(quality: Quality, values: Tensor) -> Interval | None:
    if quality.share:
        return wilson(float(values.sum()), len(values))
    sums = torch.stack([values.double(), torch.ones(len(values), dtype=torch.float64)], 1)
    return bootstrap(sums, lambda totals: totals[:, 0] / totals[:, 1])


def _methods(method: Any) -> list[Any]:
    several = isinstance(method, Sequence) and not isinstance(method, str)
    made = [as_method(one) for one in (method if several else [method])]
    if not made:
        raise InvalidOption("method is a merging method or several; got an empty list")
    for one in made:
        if not one.static:
            other = (
                f". In Python, merging.calibrate sets {one.label} to a budget" if isinstance(one, Calibrated) else ""
            )
            raise InvalidOption(
                f"tune searches the number of merges in each layer, and with method={one.label!r} that depends on the "
                f"image; choose one that merges the same number in every image, such as 'tome'{other}"
            )
        if one.decides:
            raise InvalidOption(
                f"tune searches the number of merges in each layer, which method={one.label!r} has learned already; "
                "choose another one, such as 'tome'"
            )
    return made


def _try(model: nn.Module, method: Method, proportional: bool) -> None:
    """Raise if a model cannot serve a method."""
    merge(model, 0, method=method, proportional=proportional).remove()


def _load(
    found: Found, images: Any, labels: Any, limit: int, batch_size: int, labeled: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Read and preprocess the images, in batches, with their labels where they are needed."""
    opened = open_batches(images, limit=limit, labels=labels, with_labels=labeled, axes=input_axes(found))
    batches = list(opened.batches(found.adapter.input_spec(found.trunk), batch_size))
    if not batches:
        raise UnsupportedInput("tune needs images; none of these could be read")
    if opened.skipped:
        reasons = "; ".join(reason for _, reason in opened.skipped[:3])
        warnings.warn(f"left out {counted(len(opened.skipped), 'sample')}: {reasons}", VitrailWarning, stacklevel=4)
    known = [batch.labels for batch in batches if batch.labels is not None]
    if labeled and len(known) < len(batches):
        raise UnsupportedInput("this quality needs labels, and these images have none; pass labels=")
    return [batch.images for batch in batches], torch.cat(known) if len(known) == len(batches) else None
