"""Deprecated: use :mod:`vitrail.analysis.norms`."""

from vitrail._deprecation import renamed_attributes

__getattr__ = renamed_attributes(
    __name__, {name: f"vitrail.analysis.norms:{name}" for name in ("Threshold", "Verdict", "find_threshold")}
)
