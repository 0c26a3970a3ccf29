"""Deprecated: use :mod:`vitrail.analysis.probes`."""

from vitrail._deprecation import renamed_attributes

_NAMES = ("ClassProbe", "ClassScore", "one_token_each", "probe_classes")

__getattr__ = renamed_attributes(
    __name__,
    {name: f"vitrail.analysis.probes:{name}" for name in _NAMES} | {"OneEach": "vitrail.analysis.probes:TokenPerImage"},
)
