"""What tests of measuring share."""

import functools

import pytest
import torch

from vitrail.bench import timing


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without making kernels, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm nothing up, and let samples be as short as they are: where no time is asserted, it would only pass."""
    for name, value in {"WARM_S": 0.0, "WARM_STEPS": 1, "SAMPLE_S": 0.0}.items():
        monkeypatch.setattr(timing, name, value)
