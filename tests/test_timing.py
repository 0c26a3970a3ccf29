"""Medians, spread, interleaving and time limits, on fake clocks."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from vitrail import _timing as timing
from vitrail._timing import Clock, Spread, measure


class FakeClock:
    """A clock that only steps advance."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.timed: list[float] = []

    def now(self) -> float:
        return self.seconds

    def time(self, work: Callable[[], object]) -> float:
        start = self.seconds
        work()
        self.timed.append(self.seconds - start)
        return self.seconds - start


def taking(clock: FakeClock, times: Iterator[float], log: list[int] | None = None) -> Callable[[int], None]:
    """Return a step whose calls take these times."""

    def step(index: int) -> None:
        clock.seconds += next(times)
        if log is not None:
            log.append(index)

    return step


def always(value: float) -> Iterator[float]:
    while True:
        yield value


@pytest.mark.parametrize(
    ("samples", "median", "low", "high"),
    [
        ([5.0], 5.0, 5.0, 5.0),
        ([1.0, 3.0], 2.0, 1.5, 2.5),
        ([4.0, 1.0, 3.0, 2.0, 100.0], 3.0, 2.0, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 2.5, 1.75, 3.25),
    ],
)
def test_spread(samples: list[float], median: float, low: float, high: float) -> None:
    spread = Spread.of(samples, loops=7)
    assert (spread.median, spread.low, spread.high) == pytest.approx((median, low, high))
    assert (spread.least, spread.samples, spread.loops) == (min(samples), len(samples), 7)


def test_warm_up_is_not_counted() -> None:
    clock = FakeClock()
    # three slow warm-up steps, then five samples with one outlier
    times = iter([90.0, 9.0, 9.0, 1.0, 2.0, 50.0, 3.0, 4.0])
    found = measure({"a": taking(clock, times)}, clock, seconds=1.0)
    assert found["a"] == Spread(3.0, 2.0, 4.0, 1.0, samples=5, loops=1)


def test_steps_are_interleaved_in_random_order() -> None:
    clock, log = FakeClock(), []

    def step(name: str) -> Callable[[int], None]:
        def work(index: int) -> None:
            log.append(name)
            clock.seconds += 1.0

        return work

    found = measure({name: step(name) for name in "abc"}, clock, seconds=30.0)
    rounds = ["".join(log[start : start + 3]) for start in range(9, len(log), 3)]  # after 3 × 3 warm-up steps
    assert {"".join(sorted(turn)) for turn in rounds} == {"abc"}
    assert len(set(rounds)) > 1
    assert len(rounds) == 10
    assert {spread.samples for spread in found.values()} == {10}


def test_time_budget_and_minimum_rounds() -> None:
    clock = FakeClock()
    assert measure({"slow": taking(clock, always(7.0))}, clock, seconds=1.0)["slow"].samples == timing.MIN_ROUNDS
    assert measure({"quick": taking(clock, always(0.5))}, clock, seconds=10.0)["quick"].samples == 20


def test_short_steps_are_repeated() -> None:
    clock, log = FakeClock(), []
    found = measure({"a": taking(clock, always(0.002), log)}, clock, seconds=0.2, inputs=4)
    assert found["a"].loops == round(timing.SAMPLE_S / 0.002) == 10
    assert found["a"].median == pytest.approx(0.002)
    assert clock.timed[-1] == pytest.approx(0.02)
    # inputs rotate within a sample, and the next sample starts with another one
    assert set(log) == {0, 1, 2, 3}
    assert log[-10:-5] != log[-20:-15]
    assert log[-9] == (log[-10] + 1) % 4


def test_zero_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_ROUNDS", 6)
    clock = FakeClock()
    spread = measure({"a": lambda index: None}, clock, seconds=1.0)["a"]
    assert (spread.median, spread.samples, spread.loops) == (0.0, 6, timing.MAX_LOOPS)


def test_wall_clock() -> None:
    clock = Clock(torch.device("cpu"))
    assert 0.02 <= clock.time(lambda: time.sleep(0.02)) < 2
    before = clock.now()
    assert clock.now() >= before


def test_cuda_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = f"event {sum(entry.startswith('made') for entry in log)}"
            log.append(f"made {self.name}")

        def record(self) -> None:
            log.append(f"{self.name} recorded")

        def synchronize(self) -> None:
            log.append(f"{self.name} reached")

        def elapsed_time(self, end: "Event") -> float:
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    clock = Clock(torch.device("cuda"))
    assert clock.time(lambda: log.append("work")) == 1.5
    assert log[2:] == ["idle", "event 0 recorded", "work", "event 1 recorded", "event 1 reached"]
    log.clear()
    clock.now()
    assert log == ["idle"]
