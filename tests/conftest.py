"""Fixtures of all tests: fixed seeds, no network, and a limited number of threads."""

import os
import random
from pathlib import Path

# Read when huggingface_hub is first imported. A test that wants downloaded weights fails at once instead of
# passing on one machine and hanging on another.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.fakes import toy

ROOT = Path(__file__).resolve().parents[1]

# Examples are the same in each run, and a busy machine is not a failure.
settings.register_profile("vitrail", derandomize=True, deadline=None)
settings.load_profile("vitrail")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed every generator before each test, so that no test depends on which others ran before it."""
    value = 20_230_501
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory of datasets next to the checkout; tests that use it are skipped where it is missing."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs the data sets in ../shared/data, which this machine does not have")
    return path


__all__ = ["toy"]
