"""Minimal timing, for tests that check that models are timed, not how fast they are."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail import _timing as timing


def only_moments(patch: pytest.MonkeyPatch, **more: Any) -> None:
    """Skip the warm-up and the minimum duration of samples."""
    for name, value in {"WARM_S": 0.0, "WARM_STEPS": 1, "SAMPLE_S": 0.0, **more}.items():
        patch.setattr(timing, name, value)
