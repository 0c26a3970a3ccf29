"""Dynamic batching: items of many callers run in one batch, in order of arrival, and never more wait than allowed.

`BatchQueue` decides what runs when; it knows neither threads nor clocks. `Batcher` runs it in a thread of its own.
Nothing here knows of HTTP or of models.

    >>> batcher = Batcher(lambda numbers: [2 * n for n in numbers], max_batch=8)
    >>> [answer.result() for answer in batcher.submit([1, 2, 3])]
    [2, 4, 6]
    >>> batcher.close()
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vitrail._checks import check, check_int, is_number
from vitrail.errors import ServingError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_RETRY = 60
"""Most seconds that a refused caller is told to wait."""

SMOOTHING = 0.2
"""Weight of the newest batch in the mean time of one item."""


class Overloaded(ServingError):
    """The queue is full; ``retry_after`` is the number of seconds after which it should have room again."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopped(ServingError):
    """The batcher takes no more items, or ended before this one ran."""


@dataclass(eq=False)
class Entry(Generic[Item, Result]):
    """An item that waits: when it came, when its caller gives up, and where its result goes."""

    item: Item
    arrived: float
    deadline: float = math.inf
    future: Future[Result] = field(default_factory=Future)


class BatchQueue(Generic[Item, Result]):
    """Entries in order of arrival; a batch is due when it is full, or its first entry has waited long enough.

    Args:
        max_batch: most entries in one batch.
        max_wait: seconds that the first entry of a batch waits for others.
        limit: most entries that wait.
    """

    def __init__(self, max_batch: int, max_wait: float, limit: int) -> None:
        check_int("max_batch", max_batch)
        check_int("limit", limit)
        check("max_wait", max_wait, is_number(max_wait) and max_wait >= 0, "seconds, 0 or more")
        self.max_batch, self.max_wait, self.limit = max_batch, max_wait, limit
        self._entries: deque[Entry[Item, Result]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, count: int) -> bool:
        """Return whether so many entries can be added."""
        return len(self._entries) + count <= self.limit

    def add(self, entry: Entry[Item, Result]) -> None:
        """Add an entry at the end; there must be room."""
        assert self.has_room(1)
        self._entries.append(entry)

    def due_in(self, now: float) -> float:
        """Return the seconds until the next batch is due: 0 for now, infinity while nothing waits."""
        if not self._entries:
            return math.inf
        if len(self._entries) >= self.max_batch:
            return 0.0
        return max(0.0, self._entries[0].arrived + self.max_wait - now)

    def take(self, now: float) -> tuple[list[Entry[Item, Result]], list[Entry[Item, Result]]]:
        """Remove the next batch, and the entries in front of its end whose callers have given up; return both."""
        batch: list[Entry[Item, Result]] = []
        late: list[Entry[Item, Result]] = []
        while self._entries and len(batch) < self.max_batch:
            entry = self._entries.popleft()
            gone = entry.future.cancelled() or entry.deadline <= now
            (late if gone else batch).append(entry)
        return batch, late

    def clear(self) -> list[Entry[Item, Result]]:
        """Remove and return everything."""
        entries = list(self._entries)
        self._entries.clear()
        return entries


class Batcher(Generic[Item, Result]):
    """Run a function on batches of what many threads submit.

    Args:
        run: takes a list of items and returns one result for each, in order; called in one thread, one batch at a
            time. While it runs, the next batch gathers.
        max_batch, max_wait, limit: as for `BatchQueue`.
        on_batch: called after each batch with its number of items and the seconds that it took.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result]],
        *,
        max_batch: int = 32,
        max_wait: float = 0.002,
        limit: int = 256,
        on_batch: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._run, self._on_batch = run, on_batch
        self._queue: BatchQueue[Item, Result] = BatchQueue(max_batch, max_wait, limit)
        self._changed = threading.Condition()
        self._stopping = False
        self._seconds_per_item = 0.0
        self._thread = threading.Thread(target=self._work, name="vitrail-batcher", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._queue)

    def submit(self, items: Sequence[Item], timeout: float = math.inf) -> list[Future[Result]]:
        """Add items, all or none; return a future for each.

        A future fails with `TimeoutError` if its item did not start within ``timeout`` seconds, and one that was
        cancelled does not run.

        Raises:
            Overloaded: not all of them fit in the queue.
            Stopped: the batcher was closed.
        """
        with self._changed:
            if self._stopping:
                raise Stopped("the server is stopping and takes no more requests; send it to another one")
            if not self._queue.has_room(len(items)):
                raise Overloaded(
                    f"the queue is full: {len(self._queue)} images wait, and {self._queue.limit} may. Try again later",
                    self.retry_after,
                )
            now = time.monotonic()
            entries = [Entry[Item, Result](item, now, now + timeout) for item in items]
            for entry in entries:
                self._queue.add(entry)
            self._changed.notify()
        return [entry.future for entry in entries]

    @property
    def retry_after(self) -> int:
        """Whole seconds until what waits now should have run, at the present speed: from 1 to `MAX_RETRY`."""
        return max(1, min(MAX_RETRY, math.ceil(len(self._queue) * self._seconds_per_item)))

    def ended(self, seconds: float = 0.0) -> bool:
        """Return whether the thread of a closed batcher has ended, after waiting for its last batch."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self, grace: float = 0.0) -> None:
        """Take no more items, run what waits for at most ``grace`` seconds, and fail the rest with `Stopped`.

        A batch that runs then is not waited for: see :meth:`ended`.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(grace)
        with self._changed:
            left = self._queue.clear()
            self._changed.notify()
        for entry in left:
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(Stopped("the server stopped before this request ran; send it again"))

    def _work(self) -> None:
        while True:
            with self._changed:
                while (wait := self._queue.due_in(time.monotonic())) > 0 and not (self._stopping and len(self._queue)):
                    if self._stopping:
                        return
                    self._changed.wait(None if wait == math.inf else wait)
                batch, late = self._queue.take(time.monotonic())
            for entry in late:
                if entry.future.set_running_or_notify_cancel():
                    entry.future.set_exception(TimeoutError("the item waited too long"))
            batch = [entry for entry in batch if entry.future.set_running_or_notify_cancel()]
            if batch:
                self._run_batch(batch)

    def _run_batch(self, batch: list[Entry[Item, Result]]) -> None:
        """Run a batch and set its results. If it fails, its items run one by one: a bad one fails alone."""
        start = time.monotonic()
        outcomes = self._outcomes([entry.item for entry in batch])
        seconds = time.monotonic() - start
        mean, before = seconds / len(batch), self._seconds_per_item
        self._seconds_per_item = mean if before == 0 else before + SMOOTHING * (mean - before)
        for entry, (result, error) in zip(batch, outcomes, strict=True):
            if error is None:
                entry.future.set_result(result)
            else:
                entry.future.set_exception(error)
        self._on_batch(len(batch), seconds)

    def _outcomes(self, items: list[Item]) -> list[tuple[Any, BaseException | None]]:
        try:
            results = self._run(items)
            if len(results) != len(items):
                raise ServingError(f"{len(results)} results came back for a batch of {len(items)} items")
            return [(result, None) for result in results]
        except BaseException as error:  # the thread must go on, whatever a model raises
            if len(items) == 1:
                return [(None, error)]
            return [outcome for item in items for outcome in self._outcomes([item])]
