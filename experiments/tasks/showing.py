"""What is shown of rows whose tokens were looked at: tables by token and by pair, and plots by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common.plots import COLOURS, INK, dots, figure, lines, name_lines
from experiments.common.statistics import spread
from experiments.common.study import Rows, Study
from experiments.common.tables import by_arm, markdown, plus_minus, result_table
from experiments.tasks.looking import TWO

SHARED, TOKENS, TWICE = "one class token", "a token for each task", "two tokens for each task"


def tasks_of(study: Study) -> list[str]:
    """Name the tasks of a study."""
    return [answer.removeprefix("task.") for answer in (study.answer, *study.also)]


# Tables.


def table(study: Study, rows: Rows) -> str:
    """Write accuracy by arm and task; how alike the attention of two tokens is; what each token looks at and knows."""
    parts = {
        "Accuracy": result_table(study, rows),
        "How alike two tokens look, in the last layer (cosine of their attention over patches)": by_pair(study, rows),
        "What the tokens look at in the last layer, and what a linear probe reads from each": by_token(study, rows),
    }
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in parts.items())


def by_pair(study: Study, rows: Rows) -> str:
    """Compare tokens of two tasks with tokens of one."""
    arms = by_arm(rows)
    found = {"two tasks, a token each": [row["overlap"][TWO][-1] for row in arms.get(TOKENS, ())]}
    noted = [row["pairs"] for row in arms.get(TWICE, ())]
    for task in tasks_of(study):
        found[f"the two tokens of {task}"] = [
            cosine for pairs in noted for one, other, cosine in pairs if one == other == task
        ]
    found["two tasks, of two tokens each the most alike"] = [
        max(cosine for one, other, cosine in pairs if one != other) for pairs in noted
    ]
    return markdown([["tokens", "cosine"], *([name, _written(values, "{:.3f}")] for name, values in found.items())])


def by_token(study: Study, rows: Rows) -> str:
    """Give a line for each token of each arm."""
    tasks = tasks_of(study)
    probes = [f"probe: {task}, %" for task in tasks]
    found = [["token", "looks at, patches", "of that on the object, %", *probes]]
    for arm, own in by_arm(rows).items():
        for token in own[0]["effective"]:
            inside = [100 * row["on_object"][token][-1] for row in own if row["on_object"] is not None]
            wide = _written([row["effective"][token] for row in own], "{:.1f}")
            known = [_written([100 * row["knows"][token][task] for row in own], "{:.1f}") for task in tasks]
            found.append([f"{arm}: {token}", wide, _written(inside, "{:.1f}"), *known])
    area = rows[0]["object_area"]
    if area is not None:
        found.append(["even attention", str(rows[0]["patches"]), f"{100 * area:.1f}", *["–"] * len(tasks)])
    return markdown(found)


def _written(values: Sequence[float], form: str) -> str:
    return plus_minus(spread(values), form) if values else "–"


# Plots.


def draw_all(study: Study, rows: Rows, folder: Path, own: Callable[[Study, Rows, Path], None] | None = None) -> None:
    """Draw accuracy by arm, overlap by layer, attention on the object where it is known, and what is a study's own."""
    draw_accuracy(study, rows, folder)
    draw_overlap(study, rows, folder)
    if rows[0]["on_object"] is not None:
        draw_on_object(study, rows, folder)
    if own is not None:
        own(study, rows, folder)


def draw_accuracy(study: Study, rows: Rows, folder: Path) -> None:
    """Draw the accuracy of each task by arm."""
    arms, tasks = by_arm(rows), tasks_of(study)
    colours = {SHARED: INK, TOKENS: COLOURS[0], TWICE: COLOURS[1]}
    with figure(folder / "accuracy.png", columns=len(tasks), width=9.0, height=2.2) as sides:
        for axes, task in zip(sides, tasks, strict=True):
            right = {name: [100 * row["accuracy"][f"task.{task}"] for row in own] for name, own in arms.items()}
            dots(axes, right, f"accuracy for {task}, %", colours=colours)
            axes.set_xlim(right=min(100.05, axes.get_xlim()[1]))
            axes.locator_params(axis="x", nbins=5)
        for axes in sides[1:]:
            axes.set_yticklabels([])


def draw_overlap(study: Study, rows: Rows, folder: Path) -> None:
    """Draw how alike the attention of two tokens is: by layer for a token each; every pair where a task has two."""
    arms, (first, second) = by_arm(rows), tasks_of(study)
    with figure(folder / "overlap.png", columns=2, width=11.0, height=3.2) as (left, right):
        curves = [numbered(row["overlap"][TWO]) for row in arms.get(TOKENS, ())]
        if curves:
            lines(left, {TOKENS: curves}, "layer", "cosine of attention over patches", band=False)
        left.set(title=TOKENS, ylim=(0, 1.02))
        left.locator_params(axis="x", integer=True)
        noted = [pair for row in arms.get(TWICE, ()) for pair in row["pairs"]]
        kinds = {
            f"two of {first}": [cosine for *both, cosine in noted if both == [first, first]],
            f"{first}, {second}": [cosine for *both, cosine in noted if len(set(both)) == 2],
            f"two of {second}": [cosine for *both, cosine in noted if both == [second, second]],
        }
        colours = dict(zip(kinds, (COLOURS[1], COLOURS[0], COLOURS[1]), strict=True))
        dots(right, kinds, "cosine in the last layer", colours=colours, spread=False)
        right.set(title=f"{TWICE}: every pair, every seed", xlim=(None, 1.02))


def draw_on_object(study: Study, rows: Rows, folder: Path) -> None:
    """Draw by layer how much of the attention of each task's token, and of the class token, lies on the object."""
    curves = {
        name: [numbered([100 * share for share in shares]) for shares in seeds]
        for name, seeds in by_answering(study, rows, "on_object").items()
    }
    looks = zip(curves, (INK, *COLOURS), ("-", "-", "--"), strict=False)  # one may lie on the other
    styles = {name: {"color": colour, "linestyle": line} for name, colour, line in looks}
    with figure(folder / "on_object.png") as (axes,):
        lines(axes, curves, "layer", "attention on the object, %", styles=styles)
        axes.axhline(100 * rows[0]["object_area"], color=INK, linewidth=1, linestyle=":", label="even attention")
        axes.locator_params(axis="x", integer=True)
        name_lines(axes)


def by_answering(study: Study, rows: Rows, what: str) -> dict[str, list[Any]]:
    """Give something that rows have by token, seed by seed: of the class token, and of the token of each task."""
    arms = by_arm(rows)
    who = {"class token": (SHARED, "cls"), **{f"token of {task}": (TOKENS, task) for task in tasks_of(study)}}
    return {name: [row[what][token] for row in arms[arm]] for name, (arm, token) in who.items() if arm in arms}


def numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    """Number the layers from 1."""
    return [(float(layer), value) for layer, value in enumerate(values, 1)]
