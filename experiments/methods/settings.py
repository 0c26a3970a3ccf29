"""Rows by setting, and paired comparisons of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common.results import unpack
from experiments.common.statistics import Difference, paired_difference

Row = Mapping[str, Any]
By = dict[tuple[str, float], dict[int, Row]]
"""Rows of one model by variant and share, then by seed."""


def by_variant(rows: Sequence[Row], kind: str) -> By:
    """Return the rows of a model by variant and share, then by seed; the newest of each key."""
    newest = {row["key"]: row for row in rows}
    found: By = {}
    for row in newest.values():
        if row["model"] == kind and "skipped" not in row:
            found.setdefault((row["variant"], row["share"]), {})[row["seed"]] = row
    return found


def compared(first: Mapping[int, Row], second: Mapping[int, Row], name: str = "correct") -> Difference | None:
    """Compare two settings on the seeds that both have; None if there are none."""
    seeds = sorted(set(first) & set(second))
    if not seeds:
        return None
    one, other = (
        np.stack([unpack(side[seed][name], side[seed]["count"]) for seed in seeds]).astype(float)
        for side in (first, second)
    )
    return paired_difference(one, other)


def grouped(first: Mapping[int, Row], second: Mapping[int, Row], name: str) -> Difference | None:
    """Compare means over groups of images on the seeds that both have; None if there are none."""
    seeds = sorted(set(first) & set(second))
    if not seeds:
        return None
    one, other = (np.stack([np.array(side[seed][name]) for seed in seeds]) for side in (first, second))
    return paired_difference(one, other)


def mean(rows: Mapping[int, Row], name: str) -> float:
    """Return the mean of a field over seeds."""
    return float(np.mean([row[name] for row in rows.values()]))
