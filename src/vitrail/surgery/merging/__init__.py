"""``vitrail.merge``: its handle, and what the handle does to methods and settings."""

from vitrail.surgery.merging.guidance import look_ahead
from vitrail.surgery.merging.merging import Merging, merge
from vitrail.surgery.merging.payoff import Payoff
from vitrail.surgery.merging.trained_methods import load_method

__all__ = ["Merging", "Payoff", "load_method", "look_ahead", "merge"]
