"""Fixtures of the benchmark tests."""

import functools

import pytest
import torch

from tests.bench.models import CountingClock
from tests.moments import only_moments
from vitrail.bench import benchmark


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating kernels, which is slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip warm-up and long samples where no time is asserted."""
    only_moments(monkeypatch)


@pytest.fixture
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count readings of the clock instead of seconds."""
    monkeypatch.setattr(benchmark, "Clock", lambda device: CountingClock())
