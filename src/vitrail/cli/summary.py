"""What a run did, for people (a table, a short text) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from vitrail import __version__
from vitrail.cli._output import write_text

COLUMNS = ("picture", "panes", "tokens", "GFLOPs", "cosine", "top-1", "ms")
LEGEND = (
    "Panes: groups of patches in the picture. Tokens: those that leave the last block, without → with "
    "merging. GFLOPs: 10⁹ multiply-adds for one picture. Cosine: between the model's outputs without and "
    "with merging. Top-1: whether the most likely class stays the same, by name where names are known. Ms: one pass "
    "each, so a rough figure."
)


@dataclass(frozen=True)
class Guess:
    """A class by its name, and how likely the model takes it to be."""

    name: str
    probability: float


Guesses = dict[str, list[Guess]]
"""The most likely classes, the likeliest first, by question: a model may have learnt several columns of labels."""


@dataclass(frozen=True)
class Cost:
    """What one picture costs, without and with merging."""

    tokens_before: list[int]
    tokens_after: list[int]
    flops_before: int
    flops_after: int


@dataclass(frozen=True)
class Result:
    """What came out for one picture.

    ``cosine`` and ``same_top1`` are None where they mean nothing; guesses are empty where classes have no names.
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
        """Whether the most likely class stays the same, and which it is, in a few words."""
        if self.same_top1 is None:
            return "–"
        if not self.guesses_before:
            return "same" if self.same_top1 else "other"
        before, after = first_names(self.guesses_before), first_names(self.guesses_after)
        return f"same: {before}" if before == after else f"{before} → {after}"


@dataclass(frozen=True)
class Skipped:
    """A picture that could not be read."""

    picture: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """One model, merged in one way at one input size, over some pictures."""

    model: str
    weights: str
    device: str
    input_size: tuple[int, ...]
    merging: dict[str, Any]
    cost: Cost
    pictures: list[Result]
    skipped: list[Skipped] = field(default_factory=list)

    def rows(self) -> list[tuple[str, ...]]:
        """Give a line of the table for each picture."""
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


def first_names(guesses: Guesses) -> str:
    """Name the most likely class of each question."""
    return ", ".join(best[0].name for best in guesses.values())


def table(runs: Sequence[Summary], title: str) -> Table:
    """Make the table for the terminal."""
    made = Table(*COLUMNS, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for run in runs:
        for row in run.rows():
            made.add_row(*row)
    return made


def markdown(runs: Sequence[Summary], heading: str, remarks: Sequence[str] = ()) -> str:
    """Make the short text: the table, what its columns mean, tokens per layer, and what was skipped."""
    lines = [f"# {heading}", ""]
    lines += [line for remark in remarks for line in (remark, "")]
    lines += [markdown_row(COLUMNS), "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    lines += [markdown_row(row) for run in runs for row in run.rows()]
    lines += ["", LEGEND, ""]
    lines += dict.fromkeys(line for run in runs for line in _details(run))  # once where runs are alike
    return "\n".join([*lines, "", f"Written by Vitrail {__version__}.", ""])


def markdown_row(cells: Sequence[str]) -> str:
    """Write a line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _details(run: Summary) -> list[str]:
    height, width = run.input_size
    settings = ", ".join(f"{name}={value}" for name, value in run.merging.items())
    tokens = " ".join(str(count) for count in run.cost.tokens_after)
    return [
        f"- {run.model} ({run.weights} weights, {run.device}), input {height} × {width}, merged with "
        f"{settings}: {tokens} tokens leave the blocks, instead of {run.cost.tokens_before[-1]} each time.",
        *(f"- Skipped: {skipped.reason}" for skipped in run.skipped),
    ]


def write_summary(folder: Path, data: dict[str, Any], text: str) -> None:
    """Write ``summary.json`` and ``summary.md``."""
    content = json.dumps({"vitrail": __version__, **data}, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / "summary.json", content + "\n")
    write_text(folder / "summary.md", text)


def as_data(run: Summary) -> dict[str, Any]:
    """Give a summary as plain data."""
    return asdict(run)
