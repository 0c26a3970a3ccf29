"""A cache of bounded size, shared by all sessions: what was used least recently leaves first."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

MAX_BYTES = 256 * 2**20


class Cache:
    """Values by key, at most ``max_bytes`` of them; a larger value is computed and not kept."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: Hashable) -> Any:
        """Return a kept value, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a kept value, or compute and keep it. Two threads may both compute the same one."""
        value = self.find(key)
        if value is None:
            value = compute()
            self.put(key, value)
        return value

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a value, and let the least recently used ones go."""
        size = size_of(value)
        with self._lock:
            self.bytes -= self._values.pop(key, (None, 0))[1]
            if size > self.max_bytes:
                return
            self._values[key] = value, size
            self.bytes += size
            while self.bytes > self.max_bytes:
                self.bytes -= self._values.popitem(last=False)[1][1]


def size_of(value: Any) -> int:
    """Return roughly how many bytes a value of tensors, containers and plain data takes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 100
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(size_of(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(size_of(one) for one in value)
    return sys.getsizeof(value)
