"""Eager for a while: what somebody looks at inside a model lives outside of any compiled graph."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models as they are written for as long as this lasts, in every thread; nothing is compiled anew."""
    _hold(1)
    try:
        yield
    finally:
        _hold(-1)


_lock = threading.Lock()
_count = 0
_stance: Any = None


def _hold(change: int) -> None:
    """Count those who look, over all threads; the first turns compiled code off and the last turns it on again."""
    global _count, _stance
    with _lock:
        _count += change
        if _count == 1 and change == 1 and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        elif _count == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
