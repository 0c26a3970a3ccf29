"""Tables and plots of models measured at many settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.common.plots import COLORS, dots, figure, legend, lines, scatter_curves
from experiments.common.results import by_arm
from experiments.common.statistics import spread
from experiments.common.study import Arm, Column, Row, Rows, Study
from experiments.common.tables import difference, markdown, plus_minus, points, result_table, titled_tables
from experiments.merging.measure import KINDS, MERGED, UNMERGED, Setting, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS_BY_R = (
    Column("samples/s", lambda row: row["images_per_s"], "{:,.0f}"),
    Column("speed-up", lambda row: row["speed_up"], "{:.2f}"),
    Column("GFLOPs", lambda row: row["gflops"], "{:.2f}"),
    Column("tokens left", lambda row: row["tokens"], "{:.0f}"),
)


def row_at(row: Mapping[str, Any], setting: Setting, name: str = "") -> Row:
    """Return a row with the measurements of one setting, under another arm name if one is given."""
    measured = {(one["kind"], one["r"]): one for one in row["measured"]}
    now, before = throughput(measured[setting]), throughput(measured[UNMERGED, 0])
    faster = now / before if now and before else None
    return {**row, **measured[setting], "arm": name or row["arm"], "images_per_s": now, "speed_up": faster}


def as_trained(study: Study, rows: Rows) -> list[Row]:
    """Return rows at the setting each model was trained with, with the share of epoch time that it saved."""
    base = {row["seed"]: row["epoch_seconds"] for row in rows if row["arm"] == study.reference}
    found = [row_at(row, tuple(row["trained_with"])) for row in rows]
    for row in found:
        known = row["seed"] in base and row["arm"] != study.reference
        row["saved"] = 1 - row["epoch_seconds"] / base[row["seed"]] if known else None
    return found


def r_values(rows: Rows) -> list[int]:
    """Return every r at which the models of an arm were measured, from 0 on."""
    return [one["r"] for one in rows[0]["measured"] if one["kind"] == MERGED]


# Tables.


def table(study: Study, rows: Rows) -> str:
    """Return tables of training time, accuracy and throughput, and the other ways to reduce tokens."""
    parts = {
        "Training, and the models merged as in training": result_table(study, as_trained(study, rows)),
        "Accuracy and throughput": by_r(study, rows),
        "Other ways to reduce tokens, compared with merging at the same r": by_kind(study, rows),
    }
    return titled_tables(parts)


def by_r(study: Study, rows: Rows) -> str:
    """Compare every r of every arm with the unmerged models of the reference."""
    shown = []
    for name, own in by_arm(rows).items():
        shown += [row_at(row, (UNMERGED, 0), f"{name}: {UNMERGED}") for row in own]
        shown += [row_at(row, (MERGED, r), f"{name}: r = {r}") for r in r_values(own) for row in own]
    reference = f"{study.reference}: {UNMERGED}"
    arms = tuple(map(Arm, dict.fromkeys([reference, *(row["arm"] for row in shown)])))
    return result_table(replace(study, arms=arms, reference=reference, search=None, columns=COLUMNS_BY_R), shown)


def by_kind(study: Study, rows: Rows) -> str:
    """Compare merging with the other ways to reduce tokens at the same r."""
    others = [kind for kind in KINDS if kind != MERGED]
    found = [["arm", f"{MERGED}, %", *(f"{kind}, points" for kind in others)]]
    for name, own in by_arm(rows).items():
        for r in r_values(own)[1:]:
            merged = [row_at(row, (MERGED, r)) for row in own]
            accuracy = spread([100 * row["accuracy"][study.output] for row in merged])
            compared = [difference([row_at(row, (kind, r)) for row in own], merged, study.output) for kind in others]
            found.append([f"{name}: r = {r}", plus_minus(accuracy, "{:.2f}"), *map(points, compared)])
    return markdown(found)


# Plots.


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot accuracy over throughput with the training time, and accuracy over r for every kind of reduction."""
    arms = by_arm(rows)
    colors = dict(zip(arms, COLORS, strict=False))
    with figure(folder / "trade.png", columns=2, width=11.0, height=3.8) as (left, right):
        plot_trade_off(study, rows, left, colors)
        seconds = {name: [row["epoch_seconds"] for row in own] for name, own in arms.items()}
        dots(right, seconds, "seconds per epoch", colors=colors, title="Training")
        right.set(xlim=(0, 1.05 * max(map(max, seconds.values()))))
    with figure(folder / "kinds.png", columns=len(arms), width=5.0 * len(arms), height=3.8) as panels:
        for axes, (name, own) in zip(panels, arms.items(), strict=True):
            lines(axes, {kind: [over_r(study, row, kind) for row in own] for kind in KINDS}, "r", "accuracy, %")
            axes.set(title=name, xticks=r_values(own))
        low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(low, high)
        legend(panels[0])


def plot_trade_off(study: Study, rows: Rows, axes: Axes, colors: Mapping[str, str]) -> None:
    """Plot a curve over r for each arm, and a cross for its unmerged models."""

    def point(row: Mapping[str, Any], setting: Setting) -> tuple[float, float]:
        one = row_at(row, setting)
        return (one["images_per_s"] or float("nan")) / 1000, 100 * one["accuracy"][study.output]

    curves = {
        name: [[point(row, (MERGED, r)) for r in r_values(own)] for row in own] for name, own in by_arm(rows).items()
    }
    scatter_curves(axes, curves, "thousand samples/s, measured", "validation accuracy, %")
    means = {
        name: dict(zip(r_values(own), np.mean(curves[name], axis=0), strict=True)) for name, own in by_arm(rows).items()
    }
    for name, own in by_arm(rows).items():
        for r, mean in means[name].items():
            above = mean[1] >= max(other[r][1] for other in means.values() if r in other)
            offset: dict[str, Any] = {"xytext": (0, 5 if above else -6), "va": "bottom" if above else "top"}
            axes.annotate(
                str(r), mean, textcoords="offset points", fontsize=7, ha="center", color=colors[name], **offset
            )
        crossed = np.mean([point(row, (UNMERGED, 0)) for row in own], axis=0)
        axes.plot(*crossed, "x", color=colors[name], markersize=8, markeredgewidth=2, label=f"{name}: {UNMERGED}")
    axes.set(title="Inference; numbers are r")
    legend(axes)


def over_r(study: Study, row: Mapping[str, Any], kind: str) -> list[tuple[float, float]]:
    """Return accuracy over r; at r = 0 all kinds are equal."""
    return [(r, 100 * row_at(row, (kind if r else MERGED, r))["accuracy"][study.output]) for r in r_values([row])]
