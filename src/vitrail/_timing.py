"""Clocks, and interleaved timing of several steps."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

Step = Callable[[int], object]
"""One iteration; the argument is the index of the input to use."""

Key = TypeVar("Key", bound=Hashable)

SAMPLE_S = 0.02
"""Minimum length of a sample: shorter steps are repeated within it."""

MIN_ROUNDS, MAX_ROUNDS, MAX_LOOPS = 5, 5000, 200
WARM_STEPS, WARM_S = 3, 0.3


class Clock:
    """Times work on a device: by the wall clock, or by CUDA events.

    Events measure from an idle device to the end of the work, so launch overhead counts where it is not hidden.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        """Return the time in seconds, after all work queued so far has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, work: Callable[[], object]) -> float:
        """Run work and return the seconds it took on the device."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and minimum of ``samples``, in seconds per step; each sample has ``loops`` steps."""

    median: float
    low: float
    high: float
    least: float
    samples: int
    loops: int

    @classmethod
    def of(cls, samples: list[float], loops: int = 1) -> Spread:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median, low, high, min(samples), len(samples), loops)

    @property
    def relative(self) -> float:
        """Half the interquartile range over the median."""
        return (self.high - self.low) / 2 / self.median


def measure(steps: Mapping[Key, Step], clock: Clock, seconds: float, *, inputs: int = 1) -> dict[Key, Spread]:
    """Time several steps interleaved: one sample of each per round, in a new random order each round.

    Thermal drift and other load on the machine then affect all steps alike.
    Stop after ``seconds`` and at least :data:`MIN_ROUNDS` rounds; rotate through the indices of ``inputs`` inputs.
    """
    samples, loops = measure_rounds(steps, clock, seconds, inputs=inputs)
    return {key: Spread.of(values, loops[key]) for key, values in samples.items()}


def measure_rounds(
    steps: Mapping[Key, Step], clock: Clock, seconds: float, *, inputs: int = 1
) -> tuple[dict[Key, list[float]], dict[Key, int]]:
    """Return the seconds per step in each round, and the steps in each sample; see :func:`measure`."""
    loops = {key: _warm_up(step, clock, inputs) for key, step in steps.items()}
    samples: dict[Key, list[float]] = {key: [] for key in steps}
    order, generator = list(steps), random.Random(0)
    end = clock.now() + seconds
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and clock.now() >= end:
            break
        generator.shuffle(order)
        for key in order:
            samples[key].append(clock.time(partial(_repeat, steps[key], loops[key], done, inputs)) / loops[key])
    return samples, loops


def _warm_up(step: Step, clock: Clock, inputs: int) -> int:
    """Run a step until its speed settles, and return how often to repeat it in a sample."""
    taken: list[float] = []
    while len(taken) < WARM_STEPS or (sum(taken) < WARM_S and len(taken) < MAX_LOOPS):
        taken.append(clock.time(partial(_repeat, step, 1, len(taken), inputs)))
    # steps queued back to back may take less: the median of single steps is an upper bound
    typical = statistics.median(taken[-5:])
    return max(1, min(MAX_LOOPS, round(SAMPLE_S / typical))) if typical > 0 else MAX_LOOPS


def _repeat(step: Step, loops: int, first: int, inputs: int) -> None:
    for index in range(first, first + loops):
        step(index % inputs)
