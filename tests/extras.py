"""Test parameters: a few always run, the others only with slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def always(few: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Return values for ``parametrize``: a few unmarked, the others marked as slow."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.slow) for value in every]
