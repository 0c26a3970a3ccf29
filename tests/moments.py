"""Timing for moments only, where it matters that models are timed and not how fast they are."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail.bench import timing


def only_moments(patch: pytest.MonkeyPatch, **more: Any) -> None:
    """Warm nothing up, and let samples be as short as they are."""
    for name, value in {"WARM_S": 0.0, "WARM_STEPS": 1, "SAMPLE_S": 0.0, **more}.items():
        patch.setattr(timing, name, value)
