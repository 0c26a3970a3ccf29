"""Being asked to stop (Ctrl-C, a scheduler's SIGTERM, a closed terminal, no time left): the step is saved first."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from vitrail.errors import TrainingError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(TrainingError):
    """Somebody asked to stop; a checkpoint was written."""


class OutOfTime(Interrupted):
    """The time that a command was given is over; a checkpoint was written."""


class Stop:
    """Whether somebody asked to stop, and whether it is later than ``until``, by `time.monotonic`.

    Where one listens inside of another, both hear it: what comes after a run that was finished nevertheless can stop.
    """

    def __init__(self, until: float = math.inf) -> None:
        self.wanted = False
        self._until = until
        self._before: dict[int, Any] = {}

    @classmethod
    @contextmanager
    def listening(cls, until: float = math.inf) -> Iterator[Self]:
        """Listen for the time of a ``with`` block; asking a second time stops at once, as usual."""
        stop = cls(until)
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        stop._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, stop._ask)
        try:
            yield stop
        finally:
            if not stop.wanted:
                stop._restore()

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def _ask(self, number: int, frame: Any) -> None:
        self.wanted = True
        self._restore()
        outer = getattr(self._before[number], "__self__", None)
        if isinstance(outer, Stop):
            outer._ask(number, frame)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
