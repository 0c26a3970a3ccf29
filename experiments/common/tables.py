"""Markdown tables of results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.common.results import by_arm, unpack
from experiments.common.statistics import Difference, Spread, paired_difference, spread
from experiments.common.study import Rows, Study

NOT_MEASURED = "Not measured yet."


def difference(first: Rows, second: Rows, output: str) -> Difference | None:
    """Compare two arms on the seeds that both have; return None if there are none."""
    return pooled_difference([(first, second)], output)


def pooled_difference(pairs: Sequence[tuple[Rows, Rows]], output: str) -> Difference | None:
    """Compare the means of several pairs of arms on the seeds that all of them have; return None if there are none.

    Runs of one seed may share images, initial values and teachers, so a seed is one sample, however many the pairs.
    """
    runs = [[{row["seed"]: row for row in rows} for rows in side] for side in zip(*pairs, strict=True)]
    seeds = sorted(set.intersection(*(set(arm) for side in runs for arm in side)))
    if not seeds:
        return None
    first, second = (
        np.mean([[unpack(arm[seed]["correct"][output], arm[seed]["count"]) for seed in seeds] for arm in side], axis=0)
        for side in runs
    )
    return paired_difference(first, second)


def result_table(study: Study, rows: Rows) -> str:
    """Return a table with one line per arm: accuracy, difference to the reference, and the study's columns."""
    if not rows:
        return NOT_MEASURED
    arms, outputs = by_arm(rows), (study.output, *study.other_outputs)
    own_baselines = any(arm.against for arm in study.arms)
    heading = "difference, points" if own_baselines else f"against {study.reference}, points"
    prefixes = [f"{output}: " if study.other_outputs else "" for output in outputs]
    compared = [text for prefix in prefixes for text in (f"{prefix}accuracy, %", heading)]
    searched = list(dict.fromkeys(field for point in study.points() for field in point))
    columns = [column for column in study.columns if any(column.value(row) is not None for row in rows)]
    lines = [["arm", "seeds", *searched, *compared, *(column.heading for column in columns)]]
    for name, own in arms.items():
        against = study.arm(name).against or study.reference
        other = arms.get(against, []) if name != against else []
        cells = [text for output in outputs for text in _accuracy_and_difference(own, other, output)]
        if own_baselines and other:
            cells[1::2] = [f"{text} to {against}" for text in cells[1::2]]
        extra = [_column([column.value(row) for row in own], column.form) for column in columns]
        point = [f"{own[0]['point'][field]:g}" for field in searched]
        lines.append([name, str(len(own)), *point, *cells, *extra])
    return markdown(lines)


def _accuracy_and_difference(own: Rows, other: Rows, output: str) -> tuple[str, str]:
    accuracy = spread([100 * row["accuracy"][output] for row in own])
    return plus_minus(accuracy, "{:.2f}"), points(difference(own, other, output))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format lines as a table: the first is the heading; all columns but the first are right-aligned."""
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rest))


def titled_tables(tables: dict[str, str]) -> str:
    """Join several tables, each under its title."""
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in tables.items())


def plus_minus(values: Spread, form: str) -> str:
    """Format mean ± standard deviation; the mean alone if there is one value."""
    text = form.format(values.mean).replace("-", "−")
    return text if values.count < 2 else f"{text} ± {form.format(values.sd).replace('-', '−')}"


def points(found: Difference | None) -> str:
    """Format a difference in percentage points with its interval."""
    if found is None:
        return "–"
    return f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"


def signed(share: float) -> str:
    """Format a share in percentage points with its sign."""
    return f"{100 * share:+.2f}".replace("-", "−")


def _column(values: Sequence[float | None], form: str) -> str:
    """Format the values of one column; without a deviation if all are equal (a number of parameters, for example)."""
    known = [value for value in values if value is not None]
    return plus_minus(spread(known[:1] if len(set(known)) == 1 else known), form) if known else "–"
