"""Results of ``vitrail merge`` and ``vitrail demo``: a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.analysis.result import plain
from vitrail.cli._shared import console
from vitrail.cli._shared.output import write_text


@dataclass(frozen=True)
class Guess:
    """A class and its probability."""

    name: str
    probability: float


Guesses = dict[str, list[Guess]]
"""Most likely classes, in descending order, by label column."""


@dataclass(frozen=True)
class Cost:
    """Tokens after each block and FLOPs of one image, without and with merging."""

    tokens_before: list[int]
    tokens_after: list[int]
    flops_before: int
    flops_after: int


@dataclass(frozen=True)
class Result:
    """Comparison of the merged with the unmerged model on one sample; field names are JSON keys.

    ``cosine`` and ``same_top1`` are None where they are undefined; guesses are empty without class names. ``finite``
    is whether both outputs are.
    """

    picture: str
    panes: int
    cosine: float | None
    same_top1: bool | None
    seconds_before: float
    seconds_after: float
    guesses_before: Guesses = field(default_factory=dict)
    guesses_after: Guesses = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    finite: bool = True

    @property
    def top1(self) -> str:
        """The most likely class before and after, in a few words."""
        if self.same_top1 is None:
            return "–"
        if not self.guesses_before:
            return "same" if self.same_top1 else "other"
        both = (self.guesses_before, self.guesses_after)
        before, after = (", ".join(best[0].name for best in guesses.values()) for guesses in both)
        return f"same: {before}" if before == after else f"{before} → {after}"


@dataclass(frozen=True)
class Summary:
    """One model, merged in one way at one input size, over some samples; field names are JSON keys.

    ``skipped`` are the samples that could not be read: name (``picture``) and ``reason``.
    """

    model: str
    weights: str
    device: str
    input_size: tuple[int, ...]
    merging: dict[str, Any]
    cost: Cost
    pictures: list[Result]
    skipped: list[dict[str, str]] = field(default_factory=list)


_MARKDOWN = str.maketrans(
    {"<": "&lt;", ">": "&gt;", "&": "&amp;", **{mark: f"\\{mark}" for mark in "\\`*_[]|"}, "\n": " ", "\t": " "}
)


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is: names of files and classes are no markup and no HTML."""
    return console.printable(text).translate(_MARKDOWN)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are numbers."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    cells = ([markdown(cell) for cell in row] for row in (head, *rows))
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"| {' | '.join(marks)} |", *lines[1:]]


def write_summary(folder: Path, data: dict[str, Any], text: str) -> dict[str, Any]:
    """Write ``summary.json`` and ``summary.md``; return the values of the first."""
    values = {"vitrail": __version__, **plain(data)}
    content = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / "summary.json", content + "\n")
    write_text(folder / "summary.md", f"{text}\n\nWritten by Vitrail {__version__}.\n")
    return values
