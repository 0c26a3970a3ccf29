"""Distillation tokens with three shares of the data: hard and soft targets, registers, two kinds of teachers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.datasets import imagenette
from experiments.common.plots import COLORS, INK, dots, figure, legend, lines
from experiments.common.results import by_arm
from experiments.common.statistics import Difference
from experiments.common.study import Arm, Column, Rows, RunOf, Study
from experiments.common.tables import difference, markdown, points, pooled_difference, result_table, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, BATCH, TRAINING_IMAGES = 1000, 256, 9469
SHARES = (0.1, 0.3, 1.0)
SIZES = {"Ti": "vit_tiny_patch16", "S": "vit_small_patch16"}
TOKENS = {
    "plain": "cls",
    "registers": "cls,register=4",
    "hard": "cls,distillation",
    "hard + registers": "cls,distillation,register=4",
    "soft": "cls,distillation",
    "hard, ViT": "cls,distillation",
    "hard, no token": "cls",
}
TUNED_AS = {"registers": "plain", "hard + registers": "hard", "hard, no token": "hard", "hard, ViT": "hard"}
PLOTTED = {"conv": COLORS[6], "Ti plain": COLORS[0], "Ti hard": COLORS[1], "S plain": COLORS[5], "S hard": COLORS[4]}
REDUCED = {"epochs": 1, "warmup_epochs": 0, "image_size": 32}


def arm_name(kind: str, share: float) -> str:
    """Return the name of an arm: its kind and its share of the training data."""
    return f"{kind}, {share:.0%}".replace("%", " %")


def schedule(share: float) -> dict[str, Any]:
    """Return options for the same number of steps and warm-up steps, whatever the share."""
    steps_per_epoch = int(TRAINING_IMAGES * share) // BATCH
    return {
        "share": share,
        "epochs": round(STEPS / steps_per_epoch),
        "warmup_epochs": round(STEPS / steps_per_epoch / 10),
    }


def teacher(share: float) -> Arm:
    """Return the convolutional teacher of a share, trained on the same images as its students."""
    whole = arm_name("conv", 1.0)
    return Arm(
        arm_name("conv", share), against=arm_name("Ti plain", share), tuned_as=whole if share < 1 else None,
        model="timm:resnet18d", image_size=128,
        reduced={**REDUCED, "options": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}}, **schedule(share),
    )  # fmt: skip


def student(size: str, kind: str, share: float) -> Arm:
    """Return a student; the search uses all data, and only arms whose losses differ have their own."""
    targets: dict[str, Any] = (
        {} if kind in ("plain", "registers") else {"teacher": RunOf(arm_name("conv", share)), "distillation": "hard"}
    )
    if kind == "soft":
        targets["distillation"] = "soft"
    if kind == "hard, ViT":
        targets["teacher"] = RunOf(arm_name("S plain", share))
    name, tuned = arm_name(f"{size} {kind}", share), arm_name(f"{size} {TUNED_AS.get(kind, kind)}", 1.0)
    return Arm(
        name, tuned_as=tuned if tuned != name else None, against=arm_name(f"{size} plain", share),
        model=SIZES[size], image_size=128, patch_size=16,
        tokens=TOKENS[kind], **targets, **schedule(share),
        reduced={**REDUCED, "patch_size": 8, "options": {"width": 32, "depth": 2, "heads": 2}},
    )  # fmt: skip


def students(size: str) -> list[Arm]:
    """Return all students of a size: every kind with every share of the data."""
    return [student(size, kind, share) for share in SHARES for kind in TOKENS]


COMPARISONS = {
    "*hard* against *plain*": [("hard", "plain")],
    "*hard, ViT* against *plain*": [("hard, ViT", "plain")],
    "*soft* against *plain*": [("soft", "plain")],
    "*no token* against *plain*": [("hard, no token", "plain")],
    "distillation token against *no token*": [("hard", "hard, no token")],
    "*hard* against *soft*": [("hard", "soft")],
    "CNN against *ViT* as teacher": [("hard", "hard, ViT")],
    "*registers* against no registers": [("registers", "plain"), ("hard + registers", "hard")],
}
"""Comparisons pooled over both sizes: the kinds that are compared."""


def pairs(comparison: str, shares: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return the pairs of arms of a comparison, each of the same size and share of the data."""
    return [
        (arm_name(f"{size} {first}", share), arm_name(f"{size} {second}", share))
        for first, second in COMPARISONS[comparison]
        for size in SIZES
        for share in shares
    ]


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot accuracy and gains by the share of the data, and all students with all of it."""
    arms = by_arm(rows)
    with figure(folder / "shares.png") as (axes,):
        curves: dict[str, Any] = {}
        for kind in PLOTTED:
            found = [(100 * share, arms[arm_name(kind, share)]) for share in SHARES if arm_name(kind, share) in arms]
            seeds = set.intersection(*({row["seed"] for row in own} for _, own in found)) if found else set()
            if len(found) > 1:
                curves[kind] = [
                    [
                        (share, 100 * row["accuracy"][study.output])
                        for share, own in found
                        for row in own
                        if row["seed"] == seed
                    ]
                    for seed in sorted(seeds)
                ]
        styles = {kind: {"color": color, "marker": "o", "markersize": 4} for kind, color in PLOTTED.items()}
        lines(axes, curves, "share of the training data, %", "validation accuracy, %", styles=styles)
        set_share_axis(axes)
        legend(axes)
    plot_gains(study, arms, folder)
    whole = {name: own for name, own in arms.items() if name.endswith(", 100 %") and not name.startswith("conv")}
    with figure(folder / "arms.png") as (axes,):
        values = {name: [100 * row["accuracy"][study.output] for row in own] for name, own in whole.items()}
        dots(axes, values, "validation accuracy, %")


def set_share_axis(axes: Axes) -> None:
    """Set up the x axis for the shares of the data."""
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in SHARES], [f"{share:.0%}".rstrip("%") for share in SHARES])
    axes.minorticks_off()


def plot_gains(study: Study, arms: Mapping[str, Rows], folder: Path) -> None:
    """Plot the mean gain of each kind of student over the plain one, by the share of the data."""
    with figure(folder / "gains.png", columns=len(SIZES), width=11.0) as panels:
        panels[1].sharey(panels[0])
        for axes, size in zip(panels, SIZES, strict=True):
            curves: dict[str, Any] = {}
            for kind in TOKENS:
                curve = []
                for share in SHARES:
                    own, plain = (arms.get(arm_name(f"{size} {one}", share), []) for one in (kind, "plain"))
                    if (found := difference(own, plain, study.output)) is not None:
                        curve.append((100 * share, 100 * found.mean))
                if kind != "plain" and curve:
                    curves[kind] = [curve]
            styles = {kind: {"marker": "o", "markersize": 4} for kind in curves}
            lines(axes, curves, "share of the training data, %", "gain over plain, points", styles=styles, band=False)
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_title(size)
            set_share_axis(axes)
        legend(panels[0])


def table(study: Study, rows: Rows) -> str:
    """Return a table of pooled comparisons and a table with one line per arm."""
    arms = by_arm(rows)

    def compare(comparison: str, shares: tuple[float, ...]) -> Difference | None:
        both = [(arms.get(first, []), arms.get(second, [])) for first, second in pairs(comparison, shares)]
        return pooled_difference(both, study.output)

    lines = [["pooled, points", *(f"{100 * share:.0f} %" for share in SHARES), "all shares", "by seed"]]
    for comparison in COMPARISONS:
        found = [compare(comparison, shares) for shares in (*((share,) for share in SHARES), SHARES)]
        if any(found):
            by_seed = "–" if found[-1] is None else ", ".join(map(signed, found[-1].seeds))
            lines.append([comparison, *map(points, found), by_seed])
    return (f"{markdown(lines)}\n\n" if len(lines) > 1 else "") + result_table(study, rows)


def head_accuracy(name: str) -> Column:
    """Return the column of one head's accuracy."""

    def accuracy(row: Mapping[str, Any]) -> float | None:
        return 100 * row["accuracy"][name] if name in row["accuracy"] else None

    return Column(f"{name} head, %", accuracy, "{:.2f}")


def token_cosine(row: Mapping[str, Any]) -> float | None:
    """Return the cosine of class and distillation token in the last layer, if a model has both."""
    return (row["collapse"] or {}).get("between", {}).get("class, distillation")


def disagreement(row: Mapping[str, Any]) -> float | None:
    """Return the percentage of images on which the two heads disagree, if a model has both."""
    found = row["disagreement"] or {"heads": []}
    return 100 * found["argmax"][0][1] if found["heads"] == ["cls", "distillation"] else None


STUDY = Study(
    name="distillation",
    question="What does a distillation token gain with 10 %, 30 % and all of a small dataset, and is it due to the "
    "teacher, the loss or the token?",
    data=imagenette,
    base={"preset": "small", "batch_size": BATCH, "optimizer": "muon", "mixing": 0.5},
    arms=(
        *(teacher(share) for share in SHARES),
        *(one for size in SIZES for one in students(size)),
    ),
    reference=arm_name("Ti plain", 1.0),
    search={"lr": [1e-3, 3e-3]},
    columns=(
        head_accuracy("cls"),
        head_accuracy("distillation"),
        Column("heads disagree, %", disagreement, "{:.1f}"),
        Column("cosine of the two tokens", token_cosine, "{:.4f}"),
        Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.1f}"),
    ),
    table=table,
    plot=plot,
    reduced={"preset": "tiny", "batch_size": 8},
)
