"""What tests of measuring share."""

import functools

import pytest
import torch

from tests.moments import only_moments


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without making kernels, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time models for moments only: where no time is asserted, more of it would only pass."""
    only_moments(monkeypatch)
