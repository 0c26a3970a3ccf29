"""Public names of the package, and deprecated ones."""

import importlib

import pytest

from vitrail import analysis


def test_every_listed_name_exists() -> None:
    for name in analysis.__all__:
        module = importlib.import_module(f"vitrail.analysis.{name}")
        assert all(hasattr(module, public) for public in getattr(module, "__all__", ()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("norms:analyse_norms", "norms:analyze_norms"),
        ("threshold:find_threshold", "norms:find_threshold"),
        ("class_probe:probe_classes", "probes:probe_classes"),
        ("class_probe:OneEach", "probes:TokenPerImage"),
    ],
)
def test_deprecated_names(old: str, new: str) -> None:
    module, name = old.split(":")
    home, current = new.split(":")
    with pytest.warns(DeprecationWarning, match=current):
        found = getattr(importlib.import_module(f"vitrail.analysis.{module}"), name)
    assert found is getattr(importlib.import_module(f"vitrail.analysis.{home}"), current)
