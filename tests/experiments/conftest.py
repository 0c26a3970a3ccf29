"""What tests of several studies share."""

from collections.abc import Iterator

import pytest

from vitrail.bench import timing


@pytest.fixture(scope="module")
def short_times() -> Iterator[None]:
    """Time models for moments only: that it is done, and not how fast they are, is what such a test is about."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WARM_S": 0.0, "WARM_STEPS": 1, "SAMPLE_S": 0.0, "MIN_ROUNDS": 2}.items():
            patch.setattr(timing, name, value)
        yield
