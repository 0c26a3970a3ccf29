"""12, 24 and 36 layers, plain and with LayerScale and class attention: accuracy, and how steadily they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.choosing import run_key
from experiments.common.data import imagenette
from experiments.common.plots import COLOURS, apart, dots, figure, lines, name_lines
from experiments.common.rows import SEARCH, finished
from experiments.common.study import Arm, Column, Rows, Study
from experiments.common.tables import by_arm
from experiments.depth.looking import growth, look
from vitrail.models.config import depth_rule
from vitrail.tokens import Role, TokenSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPTHS = (12, 24, 36)
PLAIN, BOTH, SCALE, GATHER = "plain", "both", "LayerScale", "class attention"
STYLES: dict[str, dict[str, Any]] = {
    f"{kind}, {depth}": {"color": colour, "linestyle": dash}
    for kind, colour in zip((PLAIN, BOTH, SCALE, GATHER), COLOURS, strict=False)
    for depth, dash in zip(DEPTHS, (":", "--", "-"), strict=True)
}


def arm(kind: str, depth: int) -> Arm:
    """Give a model of one kind and depth. LayerScale begins as the CaiT paper says for that depth."""
    options: dict[str, Any] = {"depth": depth}
    more: dict[str, Any] = {}
    if kind in (SCALE, BOTH):
        options["layer_scale"] = depth_rule(depth)
    if kind in (GATHER, BOTH):
        options["class_attention"] = 2
        more["tokens"] = (TokenSpec("cls", Role.CLASS, enters=-1, position=False),)
    against = None if kind == PLAIN else f"{PLAIN}, {depth}"
    return Arm(f"{kind}, {depth}", against=against, options=options, **more)


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw accuracy, every point of the search, the loss, and what grows over the layers."""
    arms = by_arm(rows)
    colours = {name: str(style["color"]) for name, style in STYLES.items()}
    with figure(folder / "accuracy.png", columns=2, width=9.0) as (left, right):
        named = {name: [100 * row["accuracy"][study.answer] for row in own] for name, own in arms.items()}
        dots(left, named, "accuracy on the validation set, %", colours=colours)
        draw_search(study, arms, folder, right, colours)
        left.set_title("the best point of the search, every seed")
        right.set_title("every point of the search")
    with figure(folder / "loss.png") as (axes,):
        lines(
            axes,
            {name: [list(enumerate(row["losses"], 1)) for row in own] for name, own in arms.items()},
            "epoch", "training loss", styles=STYLES,
        )  # fmt: skip
        name_lines(axes)
    with figure(folder / "layers.png", columns=4, width=14.0) as sides:
        views = [(when, what) for what in ("tokens", "gradients") for when in ("start", "end")]
        for axes, (when, what) in zip(sides, views, strict=True):
            curves = {name: [list(enumerate(row[when][what], 1)) for row in own] for name, own in arms.items()}
            lines(axes, curves, "layer", f"length of {what}", styles=STYLES)
            axes.set(title=f"{what}, at the {when}", yscale="linear" if what == "tokens" else "log")
        name_lines(sides[0])


def draw_search(study: Study, arms: Iterable[str], folder: Path, axes: Axes, colours: Mapping[str, str]) -> None:
    """Draw what was held out at every point of the search, and a cross for each run whose loss was no number."""
    tried = finished(folder / SEARCH)
    points, broken = {}, []
    for place, name in enumerate(arms):
        found = [tried[run_key(study, study.arm(name), 0, point, folder)] for point in study.points()]
        points[name] = [100 * one["held"] for one in found if "diverged" not in one]
        broken += [(up, colours[name]) for up in apart(place, len(found) - len(points[name]))]
    told = " (×: broke off)" if broken else ""
    dots(axes, points, f"accuracy on held-out training pictures, %{told}", colours=colours, spread=False)
    edge = axes.get_xlim()[0]
    for up, colour in broken:
        axes.plot(edge, up, "x", color=colour, markersize=5, clip_on=False)


STUDY = Study(
    name="depth",
    question="Do LayerScale and class attention let a deep vision transformer train where a plain one does not?",
    data=imagenette,
    base={
        "model": "vit_tiny_patch16", "options": {}, "preset": "small", "image_size": 128, "patch_size": 16,
        "epochs": 14, "mixing": 0.5,
    },
    arms=(
        *(arm(kind, depth) for depth in DEPTHS for kind in (PLAIN, BOTH)),
        arm(SCALE, DEPTHS[-1]),
        arm(GATHER, DEPTHS[-1]),
    ),
    reference=f"{PLAIN}, {DEPTHS[0]}",
    search=[
        {"lr": 5e-4, "warmup_epochs": 1, "drop_path": 0.0},
        {"lr": 5e-4, "warmup_epochs": 5, "drop_path": 0.2},
        {"lr": 2e-3, "warmup_epochs": 1, "drop_path": 0.2},
        {"lr": 2e-3, "warmup_epochs": 5, "drop_path": 0.0},
    ],
    look=look,
    columns=(
        Column("loss of the last epoch", lambda row: row["losses"][-1], "{:.3f}"),
        Column("largest rise of the loss", lambda row: row["rise"], "{:.3f}"),
        Column("tokens grow, start", lambda row: growth(row, "start", "tokens"), "{:.2f}"),
        Column("tokens grow, end", lambda row: growth(row, "end", "tokens"), "{:.2f}"),
        Column("gradients, last to first layer, start", lambda row: growth(row, "start", "gradients"), "{:.2f}"),
        Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.2f}"),
        Column("G multiply-adds", lambda row: row["flops"] / 1e9, "{:.2f}"),
    ),
    draw=draw,
    reduced={
        "options": {"width": 32, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8, "epochs": 5,
        "batch_size": 80,
    },
)  # fmt: skip
