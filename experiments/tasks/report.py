"""Tables of the task tokens by token and by pair, and plots by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common.plots import COLORS, INK, dots, figure, legend, lines
from experiments.common.results import by_arm
from experiments.common.statistics import spread
from experiments.common.study import Rows, Study
from experiments.common.tables import markdown, plus_minus, result_table, titled_tables
from experiments.tasks.measure import OTHER_TASK

SHARED, TOKENS, TWICE = "one class token", "a token for each task", "two tokens for each task"


def tasks_of(study: Study) -> list[str]:
    """Return the names of a study's tasks."""
    return [output.removeprefix("task.") for output in (study.output, *study.other_outputs)]


# Tables.


def table(study: Study, rows: Rows) -> str:
    """Return tables of accuracy, overlap of attention between tokens, and attention and probes of each token."""
    parts = {
        "Accuracy": result_table(study, rows),
        "Overlap of the attention of two tokens in the last layer (cosine over patches)": by_pair(study, rows),
        "Attention of each token in the last layer, and accuracy of linear probes on it": by_token(study, rows),
    }
    return titled_tables(parts)


def by_pair(study: Study, rows: Rows) -> str:
    """Compare tokens of different tasks with tokens of the same task."""
    arms = by_arm(rows)
    found = {"different tasks, one token each": [row["overlap"][OTHER_TASK][-1] for row in arms.get(TOKENS, ())]}
    noted = [row["pairs"] for row in arms.get(TWICE, ())]
    for task in tasks_of(study):
        found[f"the two tokens of {task}"] = [
            cosine for pairs in noted for one, other, cosine in pairs if one == other == task
        ]
    found["different tasks, two tokens each: the most similar pair"] = [
        max(cosine for one, other, cosine in pairs if one != other) for pairs in noted
    ]
    return markdown([["tokens", "cosine"], *([name, _format(values, "{:.3f}")] for name, values in found.items())])


def by_token(study: Study, rows: Rows) -> str:
    """Return a table with one line for each token of each arm."""
    tasks = tasks_of(study)
    probes = [f"probe: {task}, %" for task in tasks]
    found = [["token", "attends to, patches", "attention on the object, %", *probes]]
    for arm, own in by_arm(rows).items():
        for token in own[0]["effective"]:
            inside = [100 * row["on_object"][token][-1] for row in own if row["on_object"] is not None]
            effective = _format([row["effective"][token] for row in own], "{:.1f}")
            probed = [_format([100 * row["knows"][token][task] for row in own], "{:.1f}") for task in tasks]
            found.append([f"{arm}: {token}", effective, _format(inside, "{:.1f}"), *probed])
    area = rows[0]["object_area"]
    if area is not None:
        found.append(["uniform attention", str(rows[0]["patches"]), f"{100 * area:.1f}", *["–"] * len(tasks)])
    return markdown(found)


def _format(values: Sequence[float], form: str) -> str:
    return plus_minus(spread(values), form) if values else "–"


# Plots.


def plot_all(study: Study, rows: Rows, folder: Path, own: Callable[[Study, Rows, Path], None] | None = None) -> None:
    """Plot accuracy by arm, overlap by layer, attention on the object if masks exist, and the study's own plot."""
    plot_accuracy(study, rows, folder)
    plot_overlap(study, rows, folder)
    if rows[0]["on_object"] is not None:
        plot_on_object(study, rows, folder)
    if own is not None:
        own(study, rows, folder)


def plot_accuracy(study: Study, rows: Rows, folder: Path) -> None:
    """Plot the accuracy of each task by arm."""
    arms, tasks = by_arm(rows), tasks_of(study)
    colors = {SHARED: INK, TOKENS: COLORS[0], TWICE: COLORS[1]}
    with figure(folder / "accuracy.png", columns=len(tasks), width=9.0, height=2.2) as panels:
        for axes, task in zip(panels, tasks, strict=True):
            accuracy = {name: [100 * row["accuracy"][f"task.{task}"] for row in own] for name, own in arms.items()}
            dots(axes, accuracy, f"accuracy for {task}, %", colors=colors)
            axes.set_xlim(right=min(100.05, axes.get_xlim()[1]))
            axes.locator_params(axis="x", nbins=5)
        for axes in panels[1:]:
            axes.set_yticklabels([])


def plot_overlap(study: Study, rows: Rows, folder: Path) -> None:
    """Plot the overlap of attention: by layer with one token for each task, every pair with two tokens each."""
    arms, (first, second) = by_arm(rows), tasks_of(study)
    with figure(folder / "overlap.png", columns=2, width=11.0, height=3.2) as (left, right):
        curves = [numbered(row["overlap"][OTHER_TASK]) for row in arms.get(TOKENS, ())]
        if curves:
            lines(left, {TOKENS: curves}, "layer", "cosine of attention", band=False)
        left.set(title=TOKENS, ylim=(0, 1.02))
        left.locator_params(axis="x", integer=True)
        noted = [pair for row in arms.get(TWICE, ()) for pair in row["pairs"]]
        kinds = {
            f"two of {first}": [cosine for *both, cosine in noted if both == [first, first]],
            f"{first}, {second}": [cosine for *both, cosine in noted if len(set(both)) == 2],
            f"two of {second}": [cosine for *both, cosine in noted if both == [second, second]],
        }
        colors = dict(zip(kinds, (COLORS[1], COLORS[0], COLORS[1]), strict=True))
        dots(right, kinds, "cosine in the last layer", colors=colors, spread=False)
        right.set(title=f"{TWICE}: every pair, every seed", xlim=(None, 1.02))


def plot_on_object(study: Study, rows: Rows, folder: Path) -> None:
    """Plot the share of attention on the object by layer, for the class token and each task token."""
    curves = {
        name: [numbered([100 * share for share in shares]) for shares in seeds]
        for name, seeds in by_task_token(study, rows, "on_object").items()
    }
    styled = zip(curves, (INK, *COLORS), ("-", "-", "--"), strict=False)  # curves may overlap
    styles = {name: {"color": color, "linestyle": line} for name, color, line in styled}
    with figure(folder / "on_object.png") as (axes,):
        lines(axes, curves, "layer", "attention on the object, %", styles=styles)
        axes.axhline(100 * rows[0]["object_area"], color=INK, linewidth=1, linestyle=":", label="uniform attention")
        axes.locator_params(axis="x", integer=True)
        legend(axes)


def by_task_token(study: Study, rows: Rows, key: str) -> dict[str, list[Any]]:
    """Return a value by token, for all seeds: of the class token, and of the token of each task."""
    arms = by_arm(rows)
    tokens = {"class token": (SHARED, "cls"), **{f"token of {task}": (TOKENS, task) for task in tasks_of(study)}}
    return {name: [row[key][token] for row in arms[arm]] for name, (arm, token) in tokens.items() if arm in arms}


def numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    """Pair values with layer numbers from 0."""
    return [(float(layer), value) for layer, value in enumerate(values)]
