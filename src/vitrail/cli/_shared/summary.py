"""Results of ``vitrail merge`` and ``vitrail demo``: a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from vitrail import __version__
from vitrail.cli._shared import console
from vitrail.cli._shared.output import write_text

COLUMNS = ("image", "panes", "tokens", "GFLOPs", "cosine", "top-1", "ms")
LEGEND = (
    "Panes: groups of patches in the image. Tokens: output of the last block, without → with merging. GFLOPs: 10⁹ "
    "multiply-adds for one image. Cosine: between the model's outputs without and with merging. Top-1: whether the "
    "most likely class stays the same. Ms: latency of a single pass each, so a rough figure."
)


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

    ``cosine`` and ``same_top1`` are None where they are undefined; guesses are empty without class names.
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

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, one for each sample."""
        cost = self.cost
        return [
            (
                result.picture,
                str(result.panes),
                f"{cost.tokens_before[-1]} → {cost.tokens_after[-1]}",
                f"{cost.flops_before / 1e9:.3g} → {cost.flops_after / 1e9:.3g}",
                "–" if result.cosine is None else f"{result.cosine:.4f}",
                result.top1,
                f"{result.seconds_before * 1e3:.0f} → {result.seconds_after * 1e3:.0f}",
            )
            for result in self.pictures
        ]


def table(summary: Summary) -> Table:
    """Return the table for the terminal."""
    made = console.table(*COLUMNS, title=f"{summary.model} ({summary.weights} weights, {summary.device})")
    for row in summary.rows():
        made.add_row(*row)
    return made


def markdown(summary: Summary) -> str:
    """Return the Markdown text: the table, its legend, tokens per layer, and skipped samples."""
    settings = ", ".join(f"{name}={value}" for name, value in summary.merging.items())
    tokens = " ".join(map(str, summary.cost.tokens_after))
    lines = [
        f"# {summary.model}, merged",
        "",
        *markdown_table(COLUMNS, summary.rows()),
        "",
        LEGEND,
        "",
        f"- {summary.model} ({summary.weights} weights, {summary.device}), input "
        f"{' × '.join(map(str, summary.input_size))}, merged with {settings}: {tokens} tokens after each block, "
        f"instead of {summary.cost.tokens_before[-1]}.",
        *(f"- Skipped: {skipped['reason']}" for skipped in summary.skipped),
    ]
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are numbers."""
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows))
    return [f"| {' | '.join(row)} |" for row in cells]


def write_summary(folder: Path, data: dict[str, Any], text: str) -> None:
    """Write ``summary.json`` and ``summary.md``."""
    content = json.dumps({"vitrail": __version__, **data}, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / "summary.json", content + "\n")
    write_text(folder / "summary.md", f"{text}\n\nWritten by Vitrail {__version__}.\n")
