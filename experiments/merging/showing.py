"""What is shown of rows whose models were measured at many settings: tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.common.plots import COLOURS, dots, figure, lines, name_lines, trade
from experiments.common.statistics import spread
from experiments.common.study import Arm, Column, Row, Rows, Study
from experiments.common.tables import by_arm, difference, markdown, plus_minus, points, result_table
from experiments.merging.measuring import KINDS, MERGED, UNMERGED, Setting, speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BY_R = (
    Column("pictures/s", lambda row: row["images_per_s"], "{:,.0f}"),
    Column("speed-up", lambda row: row["speed_up"], "{:.2f}"),
    Column("GFLOPs", lambda row: row["gflops"], "{:.2f}"),
    Column("tokens left", lambda row: row["tokens"], "{:.0f}"),
)


def at(row: Mapping[str, Any], setting: Setting, name: str = "") -> Row:
    """Give a row as if its model had been measured at this setting alone; under another name, if one is given."""
    measured = {(one["kind"], one["r"]): one for one in row["measured"]}
    now, before = speed(measured[setting]), speed(measured[UNMERGED, 0])
    faster = now / before if now and before else None
    return {**row, **measured[setting], "arm": name or row["arm"], "images_per_s": now, "speed_up": faster}


def as_trained(study: Study, rows: Rows) -> list[Row]:
    """Give rows with their models merged as they learned, and the share of an epoch's time that they saved."""
    base = {row["seed"]: row["epoch_seconds"] for row in rows if row["arm"] == study.reference}
    found = [at(row, tuple(row["trained_with"])) for row in rows]
    for row in found:
        known = row["seed"] in base and row["arm"] != study.reference
        row["saved"] = 1 - row["epoch_seconds"] / base[row["seed"]] if known else None
    return found


def values(rows: Rows) -> list[int]:
    """Give every r that the models of an arm were merged by, from 0 on."""
    return [one["r"] for one in rows[0]["measured"] if one["kind"] == MERGED]


# Tables.


def table(study: Study, rows: Rows) -> str:
    """Write what training took, accuracy over throughput, and the other ways to have fewer tokens."""
    parts = {
        "Training, and the models merged as they were trained": result_table(study, as_trained(study, rows)),
        "Accuracy over throughput": by_r(study, rows),
        "Other ways to have as few tokens, against merging at the same r": by_kind(study, rows),
    }
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in parts.items())


def by_r(study: Study, rows: Rows) -> str:
    """Compare every r of every arm with the reference's models unmerged."""
    shown = []
    for name, own in by_arm(rows).items():
        shown += [at(row, (UNMERGED, 0), f"{name}: {UNMERGED}") for row in own]
        shown += [at(row, (MERGED, r), f"{name}: r = {r}") for r in values(own) for row in own]
    reference = f"{study.reference}: {UNMERGED}"
    arms = tuple(map(Arm, dict.fromkeys([reference, *(row["arm"] for row in shown)])))
    return result_table(replace(study, arms=arms, reference=reference, search=None, columns=BY_R), shown)


def by_kind(study: Study, rows: Rows) -> str:
    """Compare merging with the other ways at the same r."""
    others = [kind for kind in KINDS if kind != MERGED]
    found = [["arm", f"{MERGED}, %", *(f"{kind}, points" for kind in others)]]
    for name, own in by_arm(rows).items():
        for r in values(own)[1:]:
            merged = [at(row, (MERGED, r)) for row in own]
            accuracy = spread([100 * row["accuracy"][study.answer] for row in merged])
            compared = [difference([at(row, (kind, r)) for row in own], merged, study.answer) for kind in others]
            found.append([f"{name}: r = {r}", plus_minus(accuracy, "{:.2f}"), *map(points, compared)])
    return markdown(found)


# Plots.


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw accuracy over throughput beside the time of training; then accuracy over r for every way."""
    arms = by_arm(rows)
    colours = dict(zip(arms, COLOURS, strict=False))
    with figure(folder / "trade.png", columns=2, width=11.0, height=3.8) as (left, right):
        draw_trade(study, rows, left, colours)
        took = {name: [row["epoch_seconds"] for row in own] for name, own in arms.items()}
        dots(right, took, "seconds for an epoch", colours=colours)
        right.set(title="Training", xlim=(0, 1.05 * max(map(max, took.values()))))
    with figure(folder / "kinds.png", columns=len(arms), width=5.0 * len(arms), height=3.8) as sides:
        for axes, (name, own) in zip(sides, arms.items(), strict=True):
            lines(axes, {kind: [over_r(study, row, kind) for row in own] for kind in KINDS}, "r", "accuracy, %")
            axes.set(title=name, xticks=values(own))
        low, high = min(axes.get_ylim()[0] for axes in sides), max(axes.get_ylim()[1] for axes in sides)
        for axes in sides:
            axes.set_ylim(low, high)
        name_lines(sides[0])


def draw_trade(study: Study, rows: Rows, axes: Axes, colours: Mapping[str, str]) -> None:
    """Draw a curve over r for each arm, and a cross where its models are unmerged."""

    def place(row: Mapping[str, Any], setting: Setting) -> tuple[float, float]:
        one = at(row, setting)
        return (one["images_per_s"] or float("nan")) / 1000, 100 * one["accuracy"][study.answer]

    curves = {
        name: [[place(row, (MERGED, r)) for r in values(own)] for row in own] for name, own in by_arm(rows).items()
    }
    trade(axes, curves, "thousand a second, measured", "accuracy on the validation set, %")
    means = {
        name: dict(zip(values(own), np.mean(curves[name], axis=0), strict=True)) for name, own in by_arm(rows).items()
    }
    for name, own in by_arm(rows).items():
        for r, point in means[name].items():
            above = point[1] >= max(other[r][1] for other in means.values() if r in other)
            beside: dict[str, Any] = {"xytext": (0, 5 if above else -6), "va": "bottom" if above else "top"}
            axes.annotate(
                str(r), point, textcoords="offset points", fontsize=7, ha="center", color=colours[name], **beside
            )
        crossed = np.mean([place(row, (UNMERGED, 0)) for row in own], axis=0)
        axes.plot(*crossed, "x", color=colours[name], markersize=8, markeredgewidth=2, label=f"{name}: {UNMERGED}")
    axes.set(title="Inference; the numbers are r")
    name_lines(axes)


def over_r(study: Study, row: Mapping[str, Any], kind: str) -> list[tuple[float, float]]:
    """Give accuracy over r; where nothing merges, all ways are one."""
    return [(r, 100 * at(row, (kind if r else MERGED, r))["accuracy"][study.answer]) for r in values([row])]
