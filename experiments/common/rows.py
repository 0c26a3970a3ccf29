"""Rows of results: lines of JSON that are only ever added, and right answers packed into text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import InvalidOption

RESULTS, SEARCH = "results.jsonl", "search.jsonl"
RUN = ("key", "arm", "seed", "point", "device")
NEEDED = {
    SEARCH: (*RUN, "held"),
    RESULTS: (*RUN, "count", "accuracy", "correct", "parameters", "seconds", "versions", "commit"),
}
"""What rows of each file have, beside what their study notes."""


def read_rows(path: Path, needed: Sequence[str] = ("arm",)) -> list[dict[str, Any]]:
    """Read all rows; none where there is no file. A line that was cut off by a kill is left out.

    Raises:
        InvalidOption: The file cannot be read, or has a line that is no row with all that is needed. A run that failed
            says so (``error``), and needs no more.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read ({error.strerror}); expected a file of rows") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        known = row if isinstance(row, dict) else {}
        lacks = [] if "error" in known else [name for name in needed if name not in known]
        if lacks:
            told = line.decode() if len(line) < 60 else f"{line[:60].decode(errors='replace')}…"
            raise InvalidOption(
                f"{path}, line {number}: expected a row with {', '.join(lacks)}; got {told}. Mend it or take it out"
            )
        found.append(known)
    return found


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, in one piece; what a kill may have left of the line before it stays apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    line = ("\n" if cut else "") + json.dumps(row, ensure_ascii=False) + "\n"
    with path.open("ab", buffering=0) as file:  # one write, so that several processes may add to the same file
        file.write(line.encode())


def finished(path: Path) -> dict[str, Mapping[str, Any]]:
    """Read the rows of runs that ended well, by key; of several the newest."""
    return {row["key"]: row for row in read_rows(path, NEEDED[path.name]) if "error" not in row}


def failed(path: Path) -> list[str]:
    """Read the keys of the runs that failed, in the order of their rows."""
    return [row["key"] for row in read_rows(path, NEEDED[path.name]) if "error" in row and "key" in row]


def pack(right: Iterable[bool]) -> str:
    """Write which answers were right as text, eight to a byte."""
    return base64.b64encode(np.packbits(np.fromiter(right, dtype=bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Read what `pack` wrote, of so many answers."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)
