"""Batching: what runs when, in one order for all, and what happens at the limits."""

import math
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import InvalidOption, ServingError
from vitrail.serve.batcher import Batcher, BatchQueue, Entry, Overloaded, Stopped


def entry(item: int, arrived: float = 0.0, deadline: float = math.inf) -> Entry:
    return Entry(item, arrived, deadline)


def items(entries: list[Entry]) -> list[int]:
    return [one.item for one in entries]


def test_batch_is_due_when_full_or_when_its_first_entry_waited() -> None:
    queue = BatchQueue(max_batch=2, max_wait=0.5, limit=10)
    assert queue.due_in(100.0) == math.inf
    queue.add(entry(1, arrived=100.0))
    assert queue.due_in(100.0) == 0.5
    assert queue.due_in(100.4) == pytest.approx(0.1)
    assert queue.due_in(101.0) == 0.0
    queue.add(entry(2, arrived=100.1))
    assert queue.due_in(100.1) == 0.0


def test_entries_leave_in_order_of_arrival_and_at_most_a_batch_at_once() -> None:
    queue = BatchQueue(max_batch=3, max_wait=0, limit=10)
    for number in range(5):
        queue.add(entry(number))
    assert [items(queue.take(0.0)[0]) for _ in range(3)] == [[0, 1, 2], [3, 4], []]


def test_entries_that_nobody_waits_for_make_room_for_others() -> None:
    queue = BatchQueue(max_batch=2, max_wait=0, limit=10)
    entries = [entry(0, deadline=1.0), entry(1), entry(2), entry(3, deadline=3.0)]
    for one in entries:
        queue.add(one)
    entries[1].future.cancel()
    batch, late = queue.take(2.0)
    assert (items(batch), items(late)) == ([2, 3], [0, 1])


@given(
    st.lists(st.integers(1, 4), max_size=20),
    st.integers(1, 5),
    st.integers(4, 12),
    st.lists(st.booleans(), max_size=40),
)
def test_nothing_is_lost_doubled_or_above_the_limit(
    groups: list[int], max_batch: int, limit: int, takes: list[bool]
) -> None:
    """Whatever the order of adding and taking, what was admitted leaves once, in order."""
    queue = BatchQueue(max_batch, 0, limit)
    admitted: list[int] = []
    left: list[int] = []
    number = 0
    for group, take in zip(groups, [*takes, *[False] * len(groups)], strict=False):
        if queue.has_room(group):
            for _ in range(group):
                queue.add(entry(number))
                admitted.append(number)
                number += 1
        assert len(queue) <= limit
        if take:
            batch, late = queue.take(0.0)
            assert len(batch) <= max_batch
            assert not late
            left += items(batch)
    while len(queue):
        left += items(queue.take(0.0)[0])
    assert left == admitted


class Gate:
    """A function over numbers that waits until it may run, and counts its batches."""

    def __init__(self) -> None:
        self.open, self.entered, self.batches = threading.Event(), threading.Semaphore(0), []

    def __call__(self, numbers: list[int]) -> list[int]:
        self.entered.release()
        assert self.open.wait(20)
        self.batches.append(list(numbers))
        return [number * number for number in numbers]


def test_what_comes_while_a_batch_runs_is_the_next_batch() -> None:
    gate = Gate()
    batcher = Batcher(gate, max_batch=8, max_wait=0)
    first = batcher.submit([3])
    assert gate.entered.acquire(timeout=20)
    rest = [batcher.submit([number]) for number in (4, 5, 6)]
    assert len(batcher) == 3
    gate.open.set()
    assert [one.result(20) for futures in (first, *rest) for one in futures] == [9, 16, 25, 36]
    assert gate.batches == [[3], [4, 5, 6]]
    batcher.close()


def test_answers_go_to_their_own_callers_under_load() -> None:
    def run(numbers: list[int]) -> list[int]:
        time.sleep(0.0005)
        return [-number for number in numbers]

    batcher = Batcher(run, max_batch=7, max_wait=0.0005, limit=1000)

    def ask(number: int) -> list[int]:
        return [future.result(20) for future in batcher.submit(range(3 * number, 3 * number + 3))]

    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(ask, range(200)))
    batcher.close()
    assert answers == [[-3 * number, -3 * number - 1, -3 * number - 2] for number in range(200)]


def test_full_queue_refuses_all_of_a_request_and_names_a_pause() -> None:
    gate = Gate()
    batcher = Batcher(gate, max_batch=1, max_wait=0, limit=3)
    running = batcher.submit([0])
    assert gate.entered.acquire(timeout=20)
    waiting = batcher.submit([1, 2])
    with pytest.raises(Overloaded, match="2 images wait, and 3 may") as refused:
        batcher.submit([3, 4])
    assert refused.value.retry_after >= 1
    assert len(batcher) == 2
    waiting += batcher.submit([5])
    gate.open.set()
    assert [one.result(20) for one in (*running, *waiting)] == [0, 1, 4, 25]
    batcher.close()


def test_an_item_that_waited_too_long_or_was_cancelled_does_not_run() -> None:
    gate = Gate()
    batcher = Batcher(gate, max_wait=0)
    running = batcher.submit([1])
    assert gate.entered.acquire(timeout=20)
    (late,) = batcher.submit([2], timeout=0.0)
    (cancelled,) = batcher.submit([3])
    assert cancelled.cancel()
    (last,) = batcher.submit([4])
    gate.open.set()
    assert (running[0].result(20), last.result(20)) == (1, 16)
    with pytest.raises(TimeoutError):
        late.result(20)
    with pytest.raises(CancelledError):
        cancelled.result(20)
    assert gate.batches == [[1], [4]]
    batcher.close()


def test_a_bad_item_fails_alone() -> None:
    def run(numbers: list[int]) -> list[float]:
        return [1 / number for number in numbers]

    batcher = Batcher(run, max_wait=0.2, max_batch=3)
    first, second, third = batcher.submit([1, 0, 2])
    assert (first.result(20), third.result(20)) == (1.0, 0.5)
    with pytest.raises(ZeroDivisionError):
        second.result(20)
    assert batcher.submit([4])[0].result(20) == 0.25
    batcher.close()


def test_a_function_that_loses_results_is_an_error() -> None:
    batcher = Batcher(lambda numbers: [], max_wait=0)
    with pytest.raises(ServingError, match="0 results came back for a batch of 1"):
        batcher.submit([1])[0].result(20)
    batcher.close()


def test_closing_runs_what_waits_within_the_grace_period() -> None:
    gate = Gate()
    batcher = Batcher(gate, max_batch=1, max_wait=0)
    futures: list[Future] = [batcher.submit([number])[0] for number in (1, 2, 3)]
    assert gate.entered.acquire(timeout=20)
    closing = threading.Thread(target=batcher.close, args=(20,))
    closing.start()
    while not batcher._stopping:
        time.sleep(0.001)
    with pytest.raises(Stopped):
        batcher.submit([4])
    gate.open.set()
    closing.join(20)
    assert [one.result(0) for one in futures] == [1, 4, 9]


def test_closing_fails_what_still_waits_afterwards() -> None:
    gate = Gate()
    batcher = Batcher(gate, max_batch=1, max_wait=0)
    running, waiting = batcher.submit([1, 2])
    assert gate.entered.acquire(timeout=20)
    batcher.close(grace=0.01)
    with pytest.raises(Stopped, match="send it again"):
        waiting.result(20)
    assert not batcher.ended()
    gate.open.set()
    assert running.result(20) == 1
    assert batcher.ended(20)


def test_batches_are_counted() -> None:
    counted: list[tuple[int, float]] = []
    batcher = Batcher(lambda numbers: numbers, max_batch=2, max_wait=0, on_batch=lambda *one: counted.append(one))
    for future in batcher.submit([1, 2, 3]):
        future.result(20)
    batcher.close(20)
    assert [count for count, _ in counted] == [2, 1]
    assert all(seconds >= 0 for _, seconds in counted)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_wait": -1}, {"limit": 0}, {"max_wait": math.nan}])
def test_wrong_settings(wrong: dict) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        BatchQueue(**{"max_batch": 1, "max_wait": 0, "limit": 1, **wrong})
