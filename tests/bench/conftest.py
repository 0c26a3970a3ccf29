"""Fixtures of the benchmark tests."""

import functools

import pytest
import torch

from tests.moments import only_moments


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating kernels, which is slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip warm-up and long samples where no time is asserted."""
    only_moments(monkeypatch)
