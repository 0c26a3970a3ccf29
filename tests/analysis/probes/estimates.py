"""Helper for tests of estimates."""

from vitrail.analysis.statistics import Estimate


def measured(estimate: Estimate | None) -> Estimate:
    """Return an estimate that must exist."""
    assert estimate is not None
    return estimate
