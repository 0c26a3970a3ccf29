"""Rows of results: lines of JSON that are only ever added, and right answers packed into text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

RESULTS, SEARCH = "results.jsonl", "search.jsonl"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows; none where there is no file. A line that was cut off by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, in one piece; what a kill may have left of the line before it stays apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    line = ("\n" if cut else "") + json.dumps(row, ensure_ascii=False) + "\n"
    with path.open("ab", buffering=0) as file:  # one write, so that several processes may add to the same file
        file.write(line.encode())


def finished(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Give the rows of runs that ended well, by key; of several the newest."""
    return {row["key"]: row for row in rows if "error" not in row}


def pack(right: Iterable[bool]) -> str:
    """Write which answers were right as text, eight to a byte."""
    return base64.b64encode(np.packbits(np.fromiter(right, dtype=bool)).tobytes()).decode()


def unpack(text: str, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Read what `pack` wrote, of so many answers."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)
