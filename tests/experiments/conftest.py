"""What tests of several studies share."""

from collections.abc import Iterator

import pytest

from tests.moments import only_moments


@pytest.fixture(scope="module")
def short_times() -> Iterator[None]:
    """Time models for moments only: that it is done, and not how fast they are, is what such a test is about."""
    with pytest.MonkeyPatch.context() as patch:
        only_moments(patch, MIN_ROUNDS=2)
        yield
