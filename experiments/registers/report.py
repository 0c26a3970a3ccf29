"""Values read from the rows of the register studies, and their plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.plots import COLORS, dots, entitle, figure, legend, lines, scatter_curves
from experiments.common.results import by_arm
from experiments.common.study import Rows, Study

COUNTS = (0, 1, 2, 4, 8, 16)
STYLES: dict[str, dict[str, Any]] = {
    f"{count} registers": {"color": color} for count, color in zip(COUNTS, COLORS, strict=False)
}
KINDS = {"class": "class token", "register": "one register", "normal": "one patch", "outlier": "one outlier"}
TREATMENTS = ("test-time registers", "random neurons")

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]

# Values of a row.


def class_probe(row: Row, kind: str) -> float | None:
    """Return the balanced accuracy (%) of the class probe on one token of a kind; the mean over registers."""
    found = [
        score["balanced_accuracy"]["mean"]
        for name, score in row["probes"]["classes"].items()
        if name.split()[0] == kind and score["accuracy"]
    ]
    return 100 * sum(found) / len(found) if found else None


def position_probe(row: Row, kind: str) -> float | None:
    """Return the accuracy (%) of the position probe on patch tokens of a kind."""
    score = row["probes"]["position"][kind]["accuracy"]
    return score and 100 * score["mean"]


def register_class_probe(register: Row) -> float:
    """Return the balanced accuracy (%) of the class probe on one register."""
    return 100 * float(register["class_probe"]["balanced_accuracy"]["mean"])


def highest_norm(row: Row) -> float:
    """Return the highest patch norm of the last layer divided by the median."""
    last = row["layers"][-1]
    return float(last["max"] / last["50"])


def outliers_left(row: Row, when: str) -> float | None:
    """Return the outliers (%) left by test-time registers (``after``) or random neurons (``control``), if tried."""
    share = row.get("cure", {}).get(when, {}).get("outlier_share")
    return None if share is None else 100 * share


# Plots.


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot norms, probes and dense tasks, each register, and the effect of test-time registers if they were tried."""
    arms = by_arm(rows)
    plot_norms(arms, folder / "norms.png")
    plot_counts(arms, folder / "registers.png")
    each = {arm: [one for row in own for one in row["registers"]] for arm, own in arms.items()}
    each = {arm: some for arm, some in each.items() if some}
    if each:
        with figure(folder / "each_register.png", columns=2, width=9.0) as (first, second):
            norms = {arm: [one["norm_ratio"] for one in some] for arm, some in each.items()}
            probes = {arm: [register_class_probe(one) for one in some] for arm, some in each.items()}
            labels = ("norm of a register / norm of a patch", "class from one register, %")
            for axes, groups, label in zip((first, second), (norms, probes), labels, strict=True):
                dots(axes, groups, label, spread=False)  # registers of one run are no independent samples
                entitle(axes, groups)
            first.locator_params(axis="x", nbins=6)
    if any(row.get("cure") for row in rows):
        plot_treatments(arms, folder / "test_time_registers.png")


def plot_norms(arms: Mapping[str, Rows], path: Path) -> None:
    """Plot the median and the highest norm by layer, and the median over training."""
    with figure(path, columns=3, width=12.0) as (first, second, third):
        by_layer = {
            arm: [[(at, one["50"]) for at, one in enumerate(row["layers"])] for row in own] for arm, own in arms.items()
        }
        lines(first, by_layer, "layer", "median norm of patch tokens", styles=STYLES)
        ratios = {
            arm: [[(at, one["max"] / one["50"]) for at, one in enumerate(row["layers"])] for row in own]
            for arm, own in arms.items()
        }
        lines(second, ratios, "layer", "highest norm / median norm", styles=STYLES)
        over = {
            arm: [[(one["epoch"], one["typical"]) for one in row["over_training"]] for row in own]
            for arm, own in arms.items()
        }
        lines(third, over, "epoch", "median norm in the last layer", styles=STYLES)
        legend(first)


def plot_counts(arms: Mapping[str, Rows], path: Path) -> None:
    """Plot probes and dense tasks by the number of registers."""
    with figure(path, columns=3, width=12.0) as panels:
        first, second, third = panels
        held = {title: partial(class_probe, kind=kind) for kind, title in KINDS.items()}
        scatter_curves(first, by_count(arms, held), "registers", "class from one token, %")
        boxes: dict[str, Value] = {
            "LOST, keys": lambda row: 100 * row["dense"]["keys"]["fixed"],
            "LOST, values": lambda row: 100 * row["dense"]["values"]["fixed"],
            "whole image as box": lambda row: 100 * row["dense"]["whole_picture"],
        }
        scatter_curves(second, by_count(arms, boxes), "registers", "objects found (CorLoc), %")
        masks: dict[str, Value] = {"linear head on patches": lambda row: 100 * row["dense"]["miou"]}
        scatter_curves(third, by_count(arms, masks), "registers", "segmentation (mIoU), %")
        for axes in panels:
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.set_xticks(COUNTS, [f"{count}" for count in COUNTS])
            legend(axes, own=True)


def by_count(arms: Mapping[str, Rows], values: Mapping[str, Value]) -> dict[str, list[list[tuple[float, float]]]]:
    """Return each value over the number of registers, one list per seed; values that some seeds lack are left out."""
    seeds = set.intersection(*({row["seed"] for row in own} for own in arms.values()))
    found = {}
    for name, value in values.items():
        complete = [
            [
                (float(arm.split()[0]), number)
                for arm, own in arms.items()
                for row in own
                if row["seed"] == seed and (number := value(row)) is not None
            ]
            for seed in sorted(seeds)
        ]
        if all(complete) and len({tuple(at for at, _ in one) for one in complete}) == 1:
            found[name] = complete
    return found


def plot_treatments(arms: Mapping[str, Rows], path: Path) -> None:
    """Plot models with artifacts unchanged, with test-time registers and with random neurons; and trained registers."""
    with_artifacts = [row for own in arms.values() for row in own if row.get("cure")]
    trained = {arm: list(own) for arm, own in arms.items() if not any(row.get("cure") for row in own)}
    with figure(path, columns=3, width=12.0) as (first, second, third):
        shares = {
            "unchanged": [100 * row["norms"]["outlier_share"] for row in with_artifacts],
            TREATMENTS[0]: [outliers_left(row, "after") for row in with_artifacts],
            TREATMENTS[1]: [outliers_left(row, "control") for row in with_artifacts],
            **{arm: [100 * row["norms"]["outlier_share"] for row in own] for arm, own in trained.items()},
        }
        dots(first, without_none(shares), "high-norm tokens, % of the patch tokens")
        views: tuple[tuple[Any, Value, str], ...] = (
            (second, lambda dense: 100 * dense["keys"]["fixed"], "objects found by LOST on keys, %"),
            (third, lambda dense: 100 * dense["miou"], "segmentation (mIoU), %"),
        )
        for axes, value, label in views:
            groups = {
                "unchanged": [value(row["dense"]) for row in with_artifacts],
                **{name: [value(row["cure"]["dense"][name]) for row in with_artifacts] for name in TREATMENTS},
                **{arm: [value(row["dense"]) for row in own] for arm, own in trained.items()},
            }
            dots(axes, without_none(groups), label)


def without_none(groups: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    """Drop missing values and empty groups."""
    found = {name: [value for value in some if value is not None] for name, some in groups.items()}
    return {name: some for name, some in found.items() if some}
