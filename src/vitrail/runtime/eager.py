"""Run compiled models eagerly for a while, so that hooks see the activations inside them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models eagerly inside a ``with`` block, in all threads, without recompiling them afterwards."""
    _change_users(1)
    try:
        yield
    finally:
        _change_users(-1)


_lock = threading.Lock()
_count = 0
_stance: Any = None


def _change_users(change: int) -> None:
    """Count users over all threads; the first disables compiled code, and the last enables it again."""
    global _count, _stance
    with _lock:
        _count += change
        if _count == 1 and change == 1 and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        elif _count == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
