"""Interrupts: Ctrl-C, SIGTERM, SIGHUP and a time limit end a run after the current step, with a checkpoint."""

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
    """A signal ended the run; a checkpoint was written."""


class OutOfTime(Interrupted):
    """The time limit ended the run; a checkpoint was written."""


class Stop:
    """Whether a signal arrived, and whether it is later than ``until`` by `time.monotonic`.

    A signal during an inner ``with`` block is also seen by the outer one.
    """

    def __init__(self, until: float = math.inf) -> None:
        self.wanted = False
        self._until = until
        self._previous: dict[int, Any] = {}

    @classmethod
    @contextmanager
    def listening(cls, until: float = math.inf) -> Iterator[Self]:
        """Listen for signals within a ``with`` block; a second signal has its usual effect."""
        stop = cls(until)
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        stop._previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, stop._handle)
        try:
            yield stop
        finally:
            if not stop.wanted:
                stop._restore()

    @property
    def late(self) -> bool:
        return time.monotonic() > self._until

    def _handle(self, number: int, frame: Any) -> None:
        self.wanted = True
        self._restore()
        outer = getattr(self._previous[number], "__self__", None)
        if isinstance(outer, Stop):
            outer._handle(number, frame)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
