"""Searches for a schedule: each spends a time budget and yields schedules, more and more merging."""

from vitrail.tuning.search.base import Problem, Search
from vitrail.tuning.search.evolution import evolve
from vitrail.tuning.search.greedy import by_sensitivity
from vitrail.tuning.search.policy import policy_gradient

SEARCHES: dict[str, Search] = {"greedy": by_sensitivity, "evolution": evolve, "policy": policy_gradient}
"""Searches by name."""

__all__ = ["SEARCHES", "Problem", "Search"]
