"""Test parameters: a few always run, the others only with slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def always(few: Collection[Any], every: Iterable[Any], *, tuples: bool = False) -> list[Any]:
    """Return values for ``parametrize``: a few unmarked, the others marked as slow.

    With ``tuples``, each value is a tuple of several parameters.
    """
    slow = pytest.mark.slow
    return [
        value if value in few else pytest.param(*value, marks=slow) if tuples else pytest.param(value, marks=slow)
        for value in every
    ]
