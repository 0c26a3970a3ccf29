"""What the rows of the studies of registers say, and their plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.plots import COLOURS, dots, figure, lines, name_lines, trade
from experiments.common.study import Rows, Study
from experiments.common.tables import by_arm

COUNTS = (0, 1, 2, 4, 8, 16)
STYLES: dict[str, dict[str, Any]] = {
    f"{count} registers": {"color": colour} for count, colour in zip(COUNTS, COLOURS, strict=False)
}
KINDS = {"class": "class token", "register": "one register", "normal": "one patch", "outlier": "one outlier"}
CURES = ("test-time registers", "random neurons")

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]

# What a row says.


def told(row: Row, kind: str) -> float | None:
    """Give the class probe's balanced accuracy in percent from one token of a kind; of registers, the mean."""
    found = [
        score["balanced_accuracy"]["mean"]
        for name, score in row["probes"]["classes"].items()
        if name.split()[0] == kind and score["accuracy"]
    ]
    return 100 * sum(found) / len(found) if found else None


def place(row: Row, kind: str) -> float | None:
    """Give in percent how often a patch token of a kind tells where it is."""
    score = row["probes"]["position"][kind]["accuracy"]
    return score and 100 * score["mean"]


def scored(register: Row) -> float:
    """Give the class probe's balanced accuracy in percent from one register."""
    return 100 * float(register["class_probe"]["balanced_accuracy"]["mean"])


def longest(row: Row) -> float:
    """Give the longest token of the last layer over the median."""
    last = row["layers"][-1]
    return float(last["max"] / last["50"])


def left(row: Row, when: str) -> float | None:
    """Give the share of outliers in percent that a cure leaves, where there was something to cure."""
    share = row.get("cure", {}).get(when, {}).get("outlier_share")
    return None if share is None else 100 * share


# Plots.


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw norms by layer and over training, what tokens hold, dense tasks, each register, and the cure if any."""
    arms = by_arm(rows)
    draw_norms(arms, folder / "norms.png")
    draw_counts(arms, folder / "registers.png")
    each = {arm: [one for row in own for one in row["registers"]] for arm, own in arms.items()}
    each = {arm: some for arm, some in each.items() if some}
    if each:
        with figure(folder / "each_register.png", columns=2, width=9.0) as (first, second):
            norms = {arm: [one["norm_ratio"] for one in some] for arm, some in each.items()}
            dots(first, norms, "norm of a register over that of a patch")
            dots(second, {arm: [scored(one) for one in some] for arm, some in each.items()}, "class from it alone, %")
            first.locator_params(axis="x", nbins=6)
    if any(row.get("cure") for row in rows):
        draw_cure(arms, folder / "cure.png")


def draw_norms(arms: Mapping[str, Rows], path: Path) -> None:
    """Draw the median norm and the longest token by layer, and the median over training."""
    with figure(path, columns=3, width=12.0) as (first, second, third):
        by_layer = {
            arm: [[(at, one["50"]) for at, one in enumerate(row["layers"], 1)] for row in own]
            for arm, own in arms.items()
        }
        lines(first, by_layer, "layer", "norm of patch tokens, median", styles=STYLES)
        ratios = {
            arm: [[(at, one["max"] / one["50"]) for at, one in enumerate(row["layers"], 1)] for row in own]
            for arm, own in arms.items()
        }
        lines(second, ratios, "layer", "longest patch token over the median", styles=STYLES)
        over = {
            arm: [[(one["epoch"], one["typical"]) for one in row["over_training"]] for row in own]
            for arm, own in arms.items()
        }
        lines(third, over, "epoch", "norm in the last layer, median", styles=STYLES)
        name_lines(first)


def draw_counts(arms: Mapping[str, Rows], path: Path) -> None:
    """Draw what tokens hold and how good dense tasks are, by the number of registers."""
    with figure(path, columns=3, width=12.0) as sides:
        first, second, third = sides
        held = {called: partial(told, kind=kind) for kind, called in KINDS.items()}
        trade(first, by_count(arms, held), "registers", "class from one token, %")
        boxes: dict[str, Value] = {
            "LOST, keys": lambda row: 100 * row["dense"]["keys"]["fixed"],
            "LOST, values": lambda row: 100 * row["dense"]["values"]["fixed"],
            "a box around all": lambda row: 100 * row["dense"]["whole_picture"],
        }
        trade(second, by_count(arms, boxes), "registers", "objects found (CorLoc), %")
        masks: dict[str, Value] = {"linear map of patches": lambda row: 100 * row["dense"]["miou"]}
        trade(third, by_count(arms, masks), "registers", "segmentation (mIoU), %")
        for axes in sides:
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.set_xticks(COUNTS, [f"{count}" for count in COUNTS])
            name_lines(axes, own=True)


def by_count(arms: Mapping[str, Rows], values: Mapping[str, Value]) -> dict[str, list[list[tuple[float, float]]]]:
    """Give each value over the number of registers, one list for each seed; what only some seeds have is left out."""
    seeds = set.intersection(*({row["seed"] for row in own} for own in arms.values()))
    found = {}
    for name, value in values.items():
        known = [
            [
                (float(arm.split()[0]), said)
                for arm, own in arms.items()
                for row in own
                if row["seed"] == seed and (said := value(row)) is not None
            ]
            for seed in sorted(seeds)
        ]
        if all(known) and len({tuple(at for at, _ in one) for one in known}) == 1:
            found[name] = known
    return found


def draw_cure(arms: Mapping[str, Rows], path: Path) -> None:
    """Draw models with artifacts as they are, with test-time registers, with random neurons; and trained registers."""
    sick = [row for own in arms.values() for row in own if row.get("cure")]
    trained = {arm: list(own) for arm, own in arms.items() if not any(row.get("cure") for row in own)}
    with figure(path, columns=3, width=12.0) as (first, second, third):
        shares = {
            "as they are": [100 * row["norms"]["outlier_share"] for row in sick],
            CURES[0]: [left(row, "after") for row in sick],
            CURES[1]: [left(row, "control") for row in sick],
            **{arm: [100 * row["norms"]["outlier_share"] for row in own] for arm, own in trained.items()},
        }
        dots(first, known(shares), "outliers, % of the patch tokens")
        views: tuple[tuple[Any, Value, str], ...] = (
            (second, lambda dense: 100 * dense["keys"]["fixed"], "objects found by LOST with keys, %"),
            (third, lambda dense: 100 * dense["miou"], "segmentation (mIoU), %"),
        )
        for axes, value, label in views:
            groups = {
                "as they are": [value(row["dense"]) for row in sick],
                **{name: [value(row["cure"]["dense"][name]) for row in sick] for name in CURES},
                **{arm: [value(row["dense"]) for row in own] for arm, own in trained.items()},
            }
            dots(axes, known(groups), label)


def known(groups: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    """Leave out what has no value."""
    found = {name: [value for value in some if value is not None] for name, some in groups.items()}
    return {name: some for name, some in found.items() if some}
