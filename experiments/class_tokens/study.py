"""One, two and four class tokens with one loss, from equal, nearly equal and different initial values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.common.data import imagenette
from experiments.common.plots import COLOURS, dots, figure, lines, name_lines
from experiments.common.scoring import inputs
from experiments.common.study import Arm, Column, Rows, Study, Trained
from experiments.common.tables import by_arm
from vitrail.analysis.roles import measure_roles
from vitrail.models import ViT
from vitrail.tokens import Role, TokenSpec
from vitrail.training import Run, read_log

COUNTS = (1, 2, 4)
STDS = ("0", "1e-6", ".02")
ADAMW = ".02, AdamW"
"""Different values by the papers' optimiser: a comparison of its own, with a search of its own."""
STYLES: dict[str, dict[str, Any]] = {  # curves lie on each other: the lower ones are wider
    f"{count} × std {std}": {"color": colour, "linewidth": width, "linestyle": dash}
    for std, colour, width in zip((*STDS, ADAMW), COLOURS, (5.0, 2.6, 1.6, 1.6), strict=False)
    for count, dash in zip(COUNTS, (":", "-", "--"), strict=True)
}


def tokens(count: int, std: float) -> tuple[TokenSpec, ...]:
    """Give class tokens that share a head. They have no position of their own, which would be a different start."""
    return (TokenSpec("cls", Role.CLASS, count, std=std, position=False),)


def arm(count: int, std: str) -> Arm:
    """Give one arm; those of as many tokens are tuned together, so that only their initial values differ."""
    name, together = (f"{count} × std {one}" for one in (std, STDS[-1]))
    return Arm(name, tuned_as=together if name != together else None, tokens=tokens(count, float(std)))


def by_adamw(count: int) -> Arm:
    """Give an arm that learns by AdamW; several tokens are compared with one that does."""
    one, name = (f"{tokens} × std {ADAMW}" for tokens in (1, count))
    return Arm(name, against=one if name != one else None, tokens=tokens(count, float(STDS[-1])), optimizer="adamw")


def look(run: Run, trained: Trained) -> dict[str, Any]:
    """Note how alike the tokens are: over training, by layer, in what they say about pictures, and as parameters.

    All of it on training pictures: the evaluations of the run's log were made on them.
    """
    over = [
        {
            "epoch": line["epoch"],
            "outputs": line["collapse"].get("within", {}).get("class"),
            "parameters": line["collapse"].get("parameters", {}).get("mean"),
        }
        for line in read_log(run.folder / "log.jsonl", "evaluation")
    ]
    assert isinstance(trained.model, ViT)
    learned = trained.model.tokens["cls"][0].detach()
    if len(learned) == 1:
        return {"over_training": over}
    seen = inputs(trained.model, trained.labels, trained.data.watched(256))
    roles = measure_roles(trained.model, seen, batch_size=64)
    centred = roles.cosines.centred
    assert roles.heads is not None
    assert centred is not None
    return {
        "over_training": over,
        "outputs_by_layer": roles.cosines.within["class"].tolist(),
        "centred_by_layer": [pairs(layer) for layer in centred],
        "disagree": pairs(roles.heads.argmax),
        "apart": (learned - learned.mean(0)).norm().item() / learned.norm().item(),
    }


def pairs(matrix: Tensor) -> float:
    """Give the mean over all pairs of a symmetric matrix, without the diagonal."""
    count = len(matrix)
    return ((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1))).item()


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw accuracy by arm, and how alike the tokens are over training."""
    arms = by_arm(rows)
    right = {name: [100 * row["accuracy"][study.answer] for row in own] for name, own in arms.items()}
    colours = {name: STYLES[name]["color"] for name in arms}
    by = {
        title: {name: values for name, values in right.items() if name.endswith(ADAMW) == adamw}
        for title, adamw in (("Muon", False), ("AdamW", True))
    }
    there = {title: own for title, own in by.items() if own}
    with figure(folder / "accuracy.png", columns=len(there), width=4.5 * len(there), height=2.8) as sides:
        for axes, (title, own) in zip(sides, there.items(), strict=True):
            dots(axes, own, "accuracy on the validation set, %", colours=colours)
            axes.set_title(title)
    several = {name: own for name, own in arms.items() if not name.startswith("1 ")}
    with figure(folder / "cosines.png", columns=2, width=9.0) as sides:
        for axes, what, title in zip(sides, ("parameters", "outputs"), ("parameters", "last layer"), strict=True):
            curves = {
                name: [[(one["epoch"], one[what]) for one in row["over_training"]] for row in own]
                for name, own in several.items()
            }
            lines(axes, curves, "epoch", "cosine between class tokens", styles=STYLES, band=False)
            axes.set(title=title, ylim=(min(-0.05, axes.get_ylim()[0]), 1.05))
        name_lines(sides[0])


def last(row: Mapping[str, Any], name: str) -> float | None:
    """Give the last of a list that a row has for several tokens only."""
    return row[name][-1] if name in row else None


STUDY = Study(
    name="class_tokens",
    question="Do class tokens that share a loss become copies of each other, and is it worth having several?",
    data=imagenette,
    base={
        "model": "vit_tiny_patch16", "preset": "small", "image_size": 128, "patch_size": 16, "epochs": 30,
        "optimizer": "muon", "mixing": 0.5,
    },
    arms=(
        *(arm(count, std) for count in COUNTS for std in (STDS if count > 1 else STDS[-1:])),
        *(by_adamw(count) for count in COUNTS),
    ),
    reference="1 × std .02",
    search={"lr": [1e-3, 3e-3]},
    watch=256,
    watch_every=5,
    look=look,
    columns=(
        Column("cosine of parameters", lambda row: row["over_training"][-1]["parameters"], "{:.4f}"),
        Column("cosine in the last layer", lambda row: last(row, "outputs_by_layer"), "{:.4f}"),
        Column("the same, centred", lambda row: last(row, "centred_by_layer"), "{:.4f}"),
        Column("tokens disagree, %", lambda row: 100 * row["disagree"] if "disagree" in row else None, "{:.2f}"),
        Column("part of the norm that differs", lambda row: row.get("apart"), "{:.1e}"),
        Column("peak memory, MiB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.0f}"),
    ),
    draw=draw,
    reduced={
        "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8,
        "epochs": 2, "batch_size": 16,
    },
)  # fmt: skip
