"""A distillation token on little and more data: with registers, hard and soft, from two kinds of teachers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.data import imagenette
from experiments.common.plots import COLOURS, INK, dots, figure, lines, name_lines
from experiments.common.statistics import Difference
from experiments.common.study import Arm, Column, Rows, RunOf, Study
from experiments.common.tables import by_arm, difference, markdown, points, pooled, result_table, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, BATCH, PICTURES = 1000, 256, 9469
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
DRAWN = {"conv": COLOURS[6], "Ti plain": COLOURS[0], "Ti hard": COLOURS[1], "S plain": COLOURS[5], "S hard": COLOURS[4]}
SMALL = {"epochs": 1, "warmup_epochs": 0, "image_size": 32}


def named(kind: str, share: float) -> str:
    """Name an arm by its kind and its share of the training data."""
    return f"{kind}, {share:.0%}".replace("%", " %")


def schedule(share: float) -> dict[str, Any]:
    """Give as many steps, and as many of them to warm up, whatever the share: less data is not less training."""
    each = int(PICTURES * share) // BATCH
    return {"share": share, "epochs": round(STEPS / each), "warmup_epochs": round(STEPS / each / 10)}


def teacher(share: float) -> Arm:
    """Give the convolutional teacher of a share: it has seen no more than its students."""
    whole = named("conv", 1.0)
    return Arm(
        named("conv", share), against=named("Ti plain", share), tuned_as=whole if share < 1 else None,
        model="timm:resnet18d", image_size=128,
        reduced={**SMALL, "options": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}}, **schedule(share),
    )  # fmt: skip


def student(size: str, kind: str, share: float) -> Arm:
    """Give a student; the search was made with all data, and for the arms whose losses differ."""
    learned: dict[str, Any] = (
        {} if kind in ("plain", "registers") else {"teacher": RunOf(named("conv", share)), "distillation": "hard"}
    )
    if kind == "soft":
        learned["distillation"] = "soft"
    if kind == "hard, ViT":
        learned["teacher"] = RunOf(named("S plain", share))
    name, tuned = named(f"{size} {kind}", share), named(f"{size} {TUNED_AS.get(kind, kind)}", 1.0)
    return Arm(
        name, tuned_as=tuned if tuned != name else None, against=named(f"{size} plain", share),
        model=SIZES[size], image_size=128, patch_size=16,
        tokens=TOKENS[kind], **learned, **schedule(share),
        reduced={**SMALL, "patch_size": 8, "options": {"width": 32, "depth": 2, "heads": 2}},
    )  # fmt: skip


def students(size: str) -> list[Arm]:
    """Give all students of a size: every kind with every share of the data."""
    return [student(size, kind, share) for share in SHARES for kind in TOKENS]


QUESTIONS = {
    "*hard* against *plain*": [("hard", "plain")],
    "*hard, ViT* against *plain*": [("hard, ViT", "plain")],
    "*soft* against *plain*": [("soft", "plain")],
    "*no token* against *plain*": [("hard, no token", "plain")],
    "a distillation token against *no token*": [("hard", "hard, no token")],
    "*hard* against *soft*": [("hard", "soft")],
    "the net against the *ViT* as teacher": [("hard", "hard, ViT")],
    "*registers* against none": [("registers", "plain"), ("hard + registers", "hard")],
}
"""What several pairs of arms ask alike: the kinds that are compared, in both sizes."""


def pairs(question: str, shares: tuple[float, ...]) -> list[tuple[str, str]]:
    """Give the arms that a question compares with some shares of the data: of the same size and share."""
    return [
        (named(f"{size} {first}", share), named(f"{size} {second}", share))
        for first, second in QUESTIONS[question]
        for size in SIZES
        for share in shares
    ]


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw accuracy over the share of the data, and all students that had all of it."""
    arms = by_arm(rows)
    with figure(folder / "shares.png") as (axes,):
        curves: dict[str, Any] = {}
        for kind in DRAWN:
            found = [(100 * share, arms[named(kind, share)]) for share in SHARES if named(kind, share) in arms]
            seeds = set.intersection(*({row["seed"] for row in own} for _, own in found)) if found else set()
            if len(found) > 1:
                curves[kind] = [
                    [
                        (share, 100 * row["accuracy"][study.answer])
                        for share, own in found
                        for row in own
                        if row["seed"] == seed
                    ]
                    for seed in sorted(seeds)
                ]
        styles = {kind: {"color": colour, "marker": "o", "markersize": 4} for kind, colour in DRAWN.items()}
        lines(axes, curves, "share of the training data, %", "accuracy on the validation set, %", styles=styles)
        by_share(axes)
        name_lines(axes)
    draw_gains(study, arms, folder)
    whole = {name: own for name, own in arms.items() if name.endswith(", 100 %") and not name.startswith("conv")}
    with figure(folder / "arms.png") as (axes,):
        values = {name: [100 * row["accuracy"][study.answer] for row in own] for name, own in whole.items()}
        dots(axes, values, "accuracy on the validation set, %")


def by_share(axes: Axes) -> None:
    """Let an axis go over the shares of the data."""
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in SHARES], [f"{share:.0%}".rstrip("%") for share in SHARES])
    axes.minorticks_off()


def draw_gains(study: Study, arms: Mapping[str, Rows], folder: Path) -> None:
    """Draw over the share of the data how far each kind of student is above the plain one, on average over seeds."""
    with figure(folder / "gains.png", columns=len(SIZES), width=11.0) as sides:
        sides[1].sharey(sides[0])
        for axes, size in zip(sides, SIZES, strict=True):
            curves: dict[str, Any] = {}
            for kind in TOKENS:
                curve = []
                for share in SHARES:
                    own, plain = (arms.get(named(f"{size} {one}", share), []) for one in (kind, "plain"))
                    if (found := difference(own, plain, study.answer)) is not None:
                        curve.append((100 * share, 100 * found.mean))
                if kind != "plain" and curve:
                    curves[kind] = [curve]
            styles = {kind: {"marker": "o", "markersize": 4} for kind in curves}
            lines(axes, curves, "share of the training data, %", "points above plain", styles=styles, band=False)
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_title(size)
            by_share(axes)
        name_lines(sides[0])


def table(study: Study, rows: Rows) -> str:
    """Write a line for each question that several pairs of arms ask alike, and one for each arm."""
    arms = by_arm(rows)

    def answered(question: str, shares: tuple[float, ...]) -> Difference | None:
        return pooled([(arms.get(one, []), arms.get(two, [])) for one, two in pairs(question, shares)], study.answer)

    lines = [["taken together, points", *(f"{100 * share:.0f} %" for share in SHARES), "all shares", "by seed"]]
    for question in QUESTIONS:
        found = [answered(question, shares) for shares in (*((share,) for share in SHARES), SHARES)]
        if any(found):
            by_seed = "–" if found[-1] is None else ", ".join(map(signed, found[-1].seeds))
            lines.append([question, *map(points, found), by_seed])
    return (f"{markdown(lines)}\n\n" if len(lines) > 1 else "") + result_table(study, rows)


def head(name: str) -> Column:
    """Give the column of one head's accuracy."""

    def accuracy(row: Mapping[str, Any]) -> float | None:
        return 100 * row["accuracy"][name] if name in row["accuracy"] else None

    return Column(f"{name} head, %", accuracy, "{:.2f}", detail=True)


def cosine(row: Mapping[str, Any]) -> float | None:
    """Give how alike the class and the distillation token are in the last layer, where a model has both."""
    return (row["collapse"] or {}).get("between", {}).get("class, distillation")


def apart(row: Mapping[str, Any]) -> float | None:
    """Give the share of pictures, in percent, that the two heads name differently, where a model has both."""
    found = row["disagreement"] or {"heads": []}
    return 100 * found["argmax"][0][1] if found["heads"] == ["cls", "distillation"] else None


STUDY = Study(
    name="distillation",
    question="What does a distillation token bring on 10 %, 30 % and all of a small data set, and is it the teacher, "
    "the loss or the token?",
    data=imagenette,
    base={"preset": "small", "batch_size": BATCH, "optimizer": "muon", "mixing": 0.5},
    arms=(
        *(teacher(share) for share in SHARES),
        *(one for size in SIZES for one in students(size)),
    ),
    reference=named("Ti plain", 1.0),
    search={"lr": [1e-3, 3e-3]},
    columns=(
        head("cls"),
        head("distillation"),
        Column("heads differ, %", apart, "{:.1f}"),
        Column("cosine of the two tokens", cosine, "{:.4f}"),
        Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.1f}", detail=True),
    ),
    table=table,
    draw=draw,
    reduced={"preset": "tiny", "batch_size": 8},
)
