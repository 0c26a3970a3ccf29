"""What a run of an arm is: the point of the search that was best for it, and a key made of all that decides it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.rows import SEARCH, finished
from experiments.common.study import Arm, RunOf, Study, plain
from vitrail.errors import InvalidOption


class Unready(InvalidOption):
    """The search of an arm is not finished."""


def best_point(study: Study, arm: Arm, out: Path) -> dict[str, Any]:
    """Give the point of the search that was best for an arm on held-out training pictures, over the search's seeds."""
    tuned, points = study.arm(arm.tuned_as or arm.name), study.points()
    done = finished(out / SEARCH) if points else {}
    scores = []
    for point in points:
        keys = [run_key(study, tuned, seed, point, out) for seed in study.search_seeds]
        if not all(key in done for key in keys):
            raise Unready(f"the search of {study.name} is not finished for the arm {tuned.name!r}; go on with it first")
        scores.append(sum(done[key]["held"] for key in keys))
    return points[scores.index(max(scores))] if points else {}


def run_key(study: Study, arm: Arm, seed: int, point: Mapping[str, Any], out: Path) -> str:
    """Name a run by all that decides it, so that a row made with other settings is never taken for it.

    Where it uses the model of another arm, that one's key is part of it.
    """
    told = {}
    for name, value in study.fields(arm, point).items():
        if isinstance(value, RunOf):
            other = study.arm(value.arm)
            told[name] = run_key(study, other, value.seed_for(seed), best_point(study, other, out), out)
        else:
            told[name] = plain(value)
    text = json.dumps([arm.name, seed, told] + ([] if arm.size is None else [arm.size]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
