"""0 to 16 registers in models that learn from labels: norms, what tokens hold, dense tasks, cost."""

from __future__ import annotations

from experiments.common.study import Arm, Column, Study
from experiments.registers.looking import look
from experiments.registers.scenes import few_and_shapes, imagenette_and_pets
from experiments.registers.showing import COUNTS, draw, left, longest, place, told
from vitrail.tokens import Role, TokenSpec


def arm(count: int) -> Arm:
    """Give a model with a class token and so many registers."""
    registers = (TokenSpec("register", Role.REGISTER, count),) if count else ()
    return Arm(f"{count} registers", tokens=(TokenSpec("cls", Role.CLASS), *registers))


COLUMNS = (
    Column("runs with artifacts", lambda row: float(row["norms"]["verdict"] == "artifacts"), "{:.2f}"),
    Column("share of outliers, %", lambda row: 100 * row["norms"]["outlier_share"], "{:.2f}"),
    Column("longest over median", longest, "{:.2f}"),
    Column("2 % at 5× would be found, %", lambda row: 100 * row["power"]["0.02"]["5"], "{:.0f}"),
    Column("species from the class token, %", lambda row: told(row, "class"), "{:.1f}", detail=True),
    Column("from one register", lambda row: told(row, "register"), "{:.1f}", detail=True),
    Column("from one patch", lambda row: told(row, "normal"), "{:.1f}", detail=True),
    Column("from one outlier", lambda row: told(row, "outlier"), "{:.1f}", detail=True),
    Column("place from a patch, %", lambda row: place(row, "normal"), "{:.1f}", detail=True),
    Column("LOST with keys, %", lambda row: 100 * row["dense"]["keys"]["fixed"], "{:.1f}", detail=True),
    Column("setting held out", lambda row: 100 * row["dense"]["keys"]["held_out"], "{:.1f}", detail=True),
    Column("LOST with values, %", lambda row: 100 * row["dense"]["values"]["fixed"], "{:.1f}", detail=True),
    Column("setting held out", lambda row: 100 * row["dense"]["values"]["held_out"], "{:.1f}", detail=True),
    Column("box around all, %", lambda row: 100 * row["dense"]["whole_picture"], "{:.1f}", detail=True),
    Column("mIoU, %", lambda row: 100 * row["dense"]["miou"], "{:.1f}"),
    Column("G multiply-adds", lambda row: row["flops"] / 1e9, "{:.3f}"),
    Column("outliers with test-time registers, %", lambda row: left(row, "after"), "{:.2f}"),
    Column("with random neurons", lambda row: left(row, "control"), "{:.2f}"),
)

STUDY = Study(
    name="registers",
    question="Do artifact tokens appear in models that learn from labels, and what do registers do?",
    data=imagenette_and_pets,
    base={
        "model": "vit_tiny_patch16", "preset": "small", "image_size": 128, "patch_size": 8, "epochs": 12,
        "optimizer": "muon",
    },
    arms=tuple(arm(count) for count in COUNTS),
    reference="0 registers",
    watch=256,
    watch_every=2,
    look=look,
    columns=COLUMNS,
    draw=draw,
    reduced={
        "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8,
        "epochs": 2, "batch_size": 32,
    },
    few=few_and_shapes,
)  # fmt: skip
