"""Fixtures of several studies."""

from collections.abc import Iterator

import pytest

from tests.moments import only_moments


@pytest.fixture(scope="module")
def short_times() -> Iterator[None]:
    """Make timing as short as possible; these tests check that it happens, not the result."""
    with pytest.MonkeyPatch.context() as patch:
        only_moments(patch, MIN_ROUNDS=2)
        yield
