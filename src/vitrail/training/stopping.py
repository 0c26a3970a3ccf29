"""Being asked to stop (Ctrl-C, a scheduler's SIGTERM, a closed terminal): the step is finished and saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from vitrail.errors import TrainingError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(TrainingError):
    """Somebody asked to stop; a checkpoint was written."""


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.wanted = False

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[Self]:
        """Listen for the time of a ``with`` block; asking a second time stops at once, as usual."""
        stop = cls()
        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def ask(number: int, frame: Any) -> None:
            stop.wanted = True
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in SIGNALS:
            signal.signal(number, ask)
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
