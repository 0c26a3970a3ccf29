"""``vitrail.tune``: the largest merge within a tolerance, or the best within a budget, on the user's own images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found, find
from vitrail.analysis.statistics import Interval, bootstrap, split_images, wilson
from vitrail.data.batches import open_batches
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.merging import Method, as_method
from vitrail.runtime.checks import refuse_merged
from vitrail.surgery import merge
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
    it (Ctrl-C) to get the best setting found so far.

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
        seconds: about how long it may take; on a slow machine fewer images are used.
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
        raise UnsupportedInput(f"tune needs 4 images or more, better some hundreds; got {trials.count}")
    split = split_images(trials.count, test_share=held_out, seed=seed)
    done = 0

    def on_batch() -> None:
        nonlocal done
        done += 1
        tell("unmerged model", done, len(loaded))

    start = time.monotonic()
    with trials.open(on_batch):
        if goal.quality.logits and trials.reference[0].shape[-1] < 2:
            raise InvalidOption(
                f"{goal.quality.name} compares classes, and this model has none; use 'cosine 0.98' or 'dense_error 0.1'"
            )
        per_image = (time.monotonic() - start) / trials.count
        # some 12 passes over the tuning images and 4 over the held-out ones, besides the search
        tuning, deciding = (
            part[: max(FEWEST, int(share * seconds / per_image / passes))]
            for part, share, passes in ((split.train, 0.35, 12), (split.test, 0.2, 4))
        )
        tuner = Tuner(trials, goal, tuning, deciding, per_image, began + seconds, seed, batch_size, tell)
        return tuner.run(methods, search, began)


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


@dataclass
class Tuner:
    """One tuning in progress."""

    trials: Trials
    goal: Goal
    tuning: Tensor
    deciding: Tensor
    per_image: float
    until: float
    seed: int
    batch_size: int
    tell: OnProgress
    values: dict[tuple[int, Counts], Candidate] = field(default_factory=dict)
    interrupted: bool = False

    def run(self, methods: Sequence[Any], search: str, began: float) -> Tuning:
        """Search, decide on the held-out images, and measure."""
        paths = self._reaching([Path("constant", one, self._constant(one)) for one in methods])
        chosen: list[tuple[Path, int]] = [(path, self._start(path)) for path in paths]
        with self._interruptible():
            if len(paths) > 1:
                paths = [min(paths, key=self._pilot)]
                chosen = [(paths[0], self._start(paths[0]))]
            index = self._choose(paths[0])
            if index is None:
                raise InvalidOption(
                    f"latency_ms={self.goal.latency_ms:g} cannot be reached for batches of {self.batch_size} images: "
                    "the most merging that tune tries takes longer; raise the budget, or use smaller batches"
                )
            chosen = [(paths[0], index)]
            target = max(FLOOR, 0.95 * self._cost(paths[0].method, paths[0].schedules[chosen[0][1]]))
            found = self._search(paths[0].method, search, target)
            if found is not None:
                path = Path(search, paths[0].method, found)
                index = self._choose(path)
                if index is not None:  # a search that ran out of time may end above the budget
                    chosen = [chosen[0], (path, index)]
        path, index, values = self._decide(chosen)
        return self._result(path, index, values, began)

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

    def _start(self, path: Path) -> int:
        """Return the index of the schedule that stands if the user interrupts at once: within a budget if any is."""
        if self.goal.gflops is not None:
            return self._within_flops(path) or 0
        return 0 if self.goal.latency_ms is None else len(path.schedules) - 1

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
        spend = max(0.0, self.until - time.monotonic()) * 0.6 / EVALUATIONS
        count = int(max(FEWEST, min(len(self.tuning), spend / max(self.per_image, 1e-9))))
        return self.tuning[: min(count, len(self.tuning))]

    def _search(self, method: Any, name: str, target: float) -> list[Counts] | None:
        """Return the best path of a search; None if there was no time for one."""
        few = self._few()
        spent = time.monotonic()

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
            until=spent + 0.7 * max(0.0, self.until - spent),
            seed=self.seed,
        )
        last: list[Counts] | None = None
        with self._interruptible():
            for path in SEARCHES[name](problem):
                last = path
        return last

    def _choose(self, path: Path) -> int | None:
        """Return the index of the schedule that meets the goal on the tuning images; None if none is within a budget.

        Within a tolerance it is the one with the most merging, within a budget the one with the least.
        """
        if self.goal.latency_ms is not None:
            return self._within_latency(path)
        if self.goal.gflops is not None:
            return self._within_flops(path)
        low, high = 0, len(path.schedules)
        while high - low > 1 and time.monotonic() < self.until:
            middle = (low + high) // 2
            low, high = (middle, high) if self._meets(self._value(path, middle)) else (low, middle)
        return low

    def _within_flops(self, path: Path) -> int | None:
        """Return the least merging whose FLOPs are within the budget; None if there is none."""
        assert self.goal.gflops is not None
        costs = (self.trials.flops(path.method, counts) for counts in path.schedules)
        return next((index for index, cost in enumerate(costs) if cost <= self.goal.gflops * 1e9), None)

    def _within_latency(self, path: Path) -> int | None:
        """Return the least merging whose measured latency is within the budget; None if there is none."""
        batch = torch.cat(self.trials.images)[: self.batch_size]
        low, high = -1, len(path.schedules)
        while high - low > 1:
            middle = (low + high) // 2
            setting = (path.method, path.schedules[middle])
            fits = 1e3 * self.trials.times([setting], batch, 0.5)[1].median <= float(self.goal.latency_ms or 0)
            low, high = (low, middle) if fits else (middle, high)
        return high if high < len(path.schedules) else None

    def _meets(self, value: float) -> bool:
        return self.goal.bound is None or self.goal.quality.meets(value, self.goal.bound)

    def _value(self, path: Path, index: int) -> float:
        """Return the quality of a schedule, mean over the tuning images."""
        counts = path.schedules[index]
        key = (id(path.method), counts)
        if key not in self.values:
            self.tell("tuning images", len(self.values), None)
            value = float(self.trials.compare(self.goal.quality, path.method, counts, self.tuning).mean())
            flops = self.trials.flops(path.method, counts)
            self.values[key] = Candidate(path.family, as_method(path.method).config, counts, flops, value)
        return self.values[key].value

    def _decide(self, chosen: Sequence[tuple[Path, int]]) -> tuple[Path, int, Tensor]:
        """Return the best choice by the held-out images; where one misses the tolerance there, merge less."""
        results: list[tuple[float, Path, int, Tensor]] = []
        for path, index in chosen:
            while True:
                self.tell("held-out images", len(results), len(chosen))
                counts = path.schedules[index]
                values = self.trials.compare(self.goal.quality, path.method, counts, self.deciding)
                if index == 0 or self._meets(float(values.mean())):
                    break
                index = index - max(1, index // 10)
            self._value(path, index)
            mean = float(values.mean())
            better = self._cost(path.method, counts) if self.goal.bound is not None else mean
            sign = -1 if self.goal.bound is None and self.goal.quality.higher else 1
            results.append((sign * better, path, index, values))
        _, path, index, values = min(results, key=lambda one: one[0])
        if self.goal.bound is not None and not any(path.schedules[index]):
            least = min((one for one in self.values.values() if any(one.r)), key=lambda one: sum(one.r), default=None)
            reached = "" if least is None else f": merging {sum(least.r)} patches gives {least.value:.4g}"
            raise InvalidOption(
                f"no merge stays within {self.goal.quality.name} {self.goal.bound:g} on these images{reached}; loosen "
                "the tolerance, or leave the model unmerged"
            )
        return path, index, values

    def _result(self, path: Path, index: int, values: Tensor, began: float) -> Tuning:
        counts = path.schedules[index]
        batch = torch.cat(self.trials.images)[: self.batch_size]
        self.tell("timing", 0, 1)
        unmerged, merged = self.trials.times([(path.method, counts)], batch, 2.0)
        merging = self.trials.apply(path.method, counts)
        config, flops = merging.config, merging.flops(self.trials._size)
        return Tuning(
            config=config,
            family=path.family,
            quality=self.goal.quality.name,
            bound=self.goal.bound,
            value=float(values.mean()),
            interval=_interval(self.goal.quality, values),
            flops=flops,
            flops_unmerged=merging.flops(self.trials._size, merged=False),
            speedup=unmerged.median / merged.median,
            latency_ms=1e3 * merged.median,
            batch=len(batch),
            tuned_on=len(self.tuning),
            held_out=len(self.deciding),
            curve=tuple(sorted(self.values.values(), key=lambda one: -one.flops)),
            seconds=time.monotonic() - began,
            interrupted=self.interrupted,
            device=str(next(self.trials.model.parameters()).device),
        )


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
            raise InvalidOption(
                f"tune searches the number of merges in each layer, and with {one.label} that depends on the image; "
                "use its thresholds (merging.calibrate), or a static method"
            )
    return made


def _try(model: nn.Module, method: Method, proportional: bool) -> None:
    """Raise if a model cannot serve a method."""
    merge(model, 0, method=method, proportional=proportional).remove()


def _load(
    found: Found, images: Any, labels: Any, limit: int, batch_size: int, labeled: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Read and preprocess the images, in batches, with their labels where they are needed."""
    opened = open_batches(images, limit=limit, labels=labels, with_labels=labeled)
    batches = list(opened.batches(found.adapter.input_spec(found.trunk), batch_size))
    if not batches:
        raise UnsupportedInput("tune needs images; none of these could be read")
    known = [batch.labels for batch in batches if batch.labels is not None]
    if labeled and len(known) < len(batches):
        raise UnsupportedInput("this quality needs labels, and these images have none; pass labels=")
    return [batch.images for batch in batches], torch.cat(known) if len(known) == len(batches) else None
