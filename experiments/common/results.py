"""Results of a study: append-only rows of JSON, run keys, and the best point of the search."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.study import Arm, Rows, RunOf, Study, to_json
from vitrail.errors import InvalidOption

RESULTS, SEARCH = "results.jsonl", "search.jsonl"
RUN = ("key", "arm", "seed", "point", "device")
REQUIRED = {
    SEARCH: (*RUN, "held"),
    RESULTS: (*RUN, "count", "accuracy", "correct", "parameters", "seconds", "versions", "commit"),
}
"""Keys that the rows of each file must have."""


class SearchUnfinished(InvalidOption):
    """The search of an arm is not finished."""


# Files of rows.


def read_rows(path: Path, required: Sequence[str] = ("arm",)) -> list[dict[str, Any]]:
    """Read all rows of a file; return none if it does not exist. A line truncated by a kill is skipped.

    Raises:
        InvalidOption: The file cannot be read, or a row lacks a required key. Rows of failed runs, which have the key
            ``error``, need no other key.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise InvalidOption(f"cannot read {path} ({error.strerror}); expected a file of rows") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        row = value if isinstance(value, dict) else {}
        missing = [] if "error" in row else [name for name in required if name not in row]
        if missing:
            shown = line.decode() if len(line) < 60 else f"{line[:60].decode(errors='replace')}…"
            raise InvalidOption(
                f"{path}, line {number}: expected a row with {', '.join(missing)}; got {shown}. Fix or remove the line"
            )
        rows.append(row)
    return rows


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row in one write, on a new line even if the last line was truncated by a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    truncated = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    line = ("\n" if truncated else "") + json.dumps(row, ensure_ascii=False) + "\n"
    with path.open("ab", buffering=0) as file:  # one write, so that several processes may append to the same file
        file.write(line.encode())


def finished(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the rows of successful runs by key; the newest if there are several."""
    return {row["key"]: row for row in read_rows(path, REQUIRED[path.name]) if "error" not in row}


def failed(path: Path) -> list[str]:
    """Return the keys of the runs that failed, in the order of their rows."""
    return [row["key"] for row in read_rows(path, REQUIRED[path.name]) if "error" in row and "key" in row]


def pack(correct: Iterable[bool]) -> str:
    """Encode which predictions are correct as base64 text, eight to a byte."""
    return base64.b64encode(np.packbits(np.fromiter(correct, dtype=bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Decode ``count`` values written by `pack`."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


# Runs of a study.


def best_point(study: Study, arm: Arm, out: Path) -> dict[str, Any]:
    """Return the point of the search with the best accuracy on held-out training images, summed over its seeds."""
    tuned, points = study.arm(arm.tuned_as or arm.name), study.points()
    done = finished(out / SEARCH) if points else {}
    scores = []
    for point in points:
        keys = [run_key(study, tuned, seed, point, out) for seed in study.search_seeds]
        if not all(key in done for key in keys):
            raise SearchUnfinished(f"the search of {study.name} is not finished for arm {tuned.name!r}; run it first")
        scores.append(sum(done[key]["held"] for key in keys))
    return points[scores.index(max(scores))] if points else {}


def run_key(study: Study, arm: Arm, seed: int, point: Mapping[str, Any], out: Path) -> str:
    """Return a hash of everything that decides a run, so that rows of other settings are never mixed up with it.

    If the run uses the model of another arm, that run's key is part of the hash.
    """
    fields = {}
    for name, value in study.fields(arm, point).items():
        if isinstance(value, RunOf):
            other = study.arm(value.arm)
            fields[name] = run_key(study, other, value.seed_for(seed), best_point(study, other, out), out)
        else:
            fields[name] = to_json(value)
    text = json.dumps([arm.name, seed, fields] + ([] if arm.size is None else [arm.size]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rows_of(study: Study, out: Path) -> list[Mapping[str, Any]]:
    """Return the rows that match the study's current settings, in the order of its arms."""
    done, rows = finished(out / RESULTS), []
    for arm in study.arms:
        try:
            point = best_point(study, arm, out)
            keys = [run_key(study, arm, seed, point, out) for seed in study.seeds]
        except SearchUnfinished:
            continue
        rows += [done[key] for key in keys if key in done]
    return rows


def by_arm(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Group rows by arm, in the order of first appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    return groups
