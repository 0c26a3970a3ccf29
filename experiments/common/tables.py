"""Tables of results in Markdown, and the marked sections of pages that hold them: nothing in them is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.choosing import best_point, run_key
from experiments.common.rows import RESULTS, finished, unpack
from experiments.common.statistics import Difference, Spread, paired_difference, spread
from experiments.common.study import Rows, Study
from vitrail.errors import InvalidOption

NOTHING = "Not measured yet."


def rows_of(study: Study, out: Path) -> list[Mapping[str, Any]]:
    """Give the rows of the study as it is now, in the order of its arms; rows of other settings are left out."""
    done, found = finished(out / RESULTS), []
    for arm in study.arms:
        try:
            point = best_point(study, arm, out)
            keys = [run_key(study, arm, seed, point, out) for seed in study.seeds]
        except InvalidOption:  # its search is not finished, so it has no results
            continue
        found += [done[key] for key in keys if key in done]
    return found


def by_arm(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Sort rows by arm, in the order in which the arms come."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def difference(first: Rows, second: Rows, answer: str) -> Difference | None:
    """Compare two arms on the seeds that both have; None where there are none."""
    return pooled([(first, second)], answer)


def pooled(pairs: Sequence[tuple[Rows, Rows]], answer: str) -> Difference | None:
    """Compare the mean of some arms with the mean of others, on the seeds that all of them have; None without any.

    Runs of one seed may share pictures, initial values and teachers. So a seed is one sample, however many pairs.
    """
    runs = [[{row["seed"]: row for row in rows} for rows in side] for side in zip(*pairs, strict=True)]
    seeds = sorted(set.intersection(*(set(arm) for side in runs for arm in side)))
    if not seeds:
        return None
    ours, theirs = (
        np.mean([[unpack(arm[seed]["correct"][answer], arm[seed]["count"]) for seed in seeds] for arm in side], axis=0)
        for side in runs
    )
    return paired_difference(ours, theirs)


def result_table(study: Study, rows: Rows) -> str:
    """Give one line for each arm: accuracy, the difference to the reference, and the study's own columns."""
    if not rows:
        return NOTHING
    arms, answers = by_arm(rows), (study.answer, *study.also)
    several = any(arm.against for arm in study.arms)
    beside = "difference, points" if several else f"against {study.reference}, points"
    named = [f"{answer}: " if study.also else "" for answer in answers]
    compared = [heading for name in named for heading in (f"{name}accuracy, %", beside)]
    searched = list(dict.fromkeys(field for point in study.points() for field in point))
    columns = [column for column in study.columns if any(column.value(row) is not None for row in rows)]
    lines = [["arm", "seeds", *searched, *compared, *(column.heading for column in columns)]]
    for name, own in arms.items():
        against = study.arm(name).against or study.reference
        other = arms.get(against, []) if name != against else []
        found = [text for answer in answers for text in _compared(own, other, answer)]
        if several and other:
            found[1::2] = [f"{text} to {against}" for text in found[1::2]]
        extra = [_column([column.value(row) for row in own], column.form) for column in columns]
        chosen = [f"{own[0]['point'][field]:g}" for field in searched]
        lines.append([name, str(len(own)), *chosen, *found, *extra])
    return markdown(lines)


def _compared(own: Rows, other: Rows, answer: str) -> tuple[str, str]:
    """Write accuracy, and the difference to another arm."""
    accuracy = spread([100 * row["accuracy"][answer] for row in own])
    return plus_minus(accuracy, "{:.2f}"), points(difference(own, other, answer))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Write lines as a table; the first is the heading, and all columns but the first are numbers."""
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rest))


def plus_minus(found: Spread, form: str) -> str:
    """Write a mean with its deviation; the mean alone where there is one value."""
    text = form.format(found.mean).replace("-", "−")
    return text if found.count < 2 else f"{text} ± {form.format(found.sd).replace('-', '−')}"


def points(found: Difference | None) -> str:
    """Write a difference in points, with its interval."""
    if found is None:
        return "–"
    return f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"


def signed(share: float) -> str:
    """Write a difference of shares in points, with its sign."""
    return f"{100 * share:+.2f}".replace("-", "−")


def _column(values: Sequence[float | None], form: str) -> str:
    """Write what rows have; a number that is the same for all, of parameters say, once."""
    known = [value for value in values if value is not None]
    return plus_minus(spread(known[:1] if len(set(known)) == 1 else known), form) if known else "–"


# Sections of pages.


def rewritten(path: Path, text: str, name: str = "results", *, blank: str = "") -> str:
    """Give a page, or a blank one, with a text between its marks ``<!-- name -->`` and ``<!-- /name -->``."""
    page = path.read_text(encoding="utf-8") if path.exists() else blank
    marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise InvalidOption(f"expected the marks <!-- {name} --> and <!-- /{name} --> in {path}, once")
    return marks.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)
