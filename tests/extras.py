"""Parameters of which a few always run, and the others only where slow tests are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def always(few: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Give every value for ``parametrize``: those among the few as they are, the others as slow extras."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.slow) for value in every]
