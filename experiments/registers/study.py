"""0 to 16 registers in models trained with labels: norms, probes, dense tasks, cost."""

from __future__ import annotations

from experiments.common.study import Arm, Column, Study
from experiments.registers.measure import measure
from experiments.registers.report import COUNTS, class_probe, highest_norm, outliers_left, plot, position_probe
from experiments.registers.scenes import imagenette_and_pets, reduced_images_and_shapes
from vitrail.tokens import Role, TokenSpec


def register_arm(count: int) -> Arm:
    """Return a model with a class token and ``count`` registers."""
    registers = (TokenSpec("register", Role.REGISTER, count),) if count else ()
    return Arm(f"{count} registers", tokens=(TokenSpec("cls", Role.CLASS), *registers))


COLUMNS = (
    Column("runs with artifacts", lambda row: float(row["norms"]["verdict"] == "artifacts"), "{:.2f}"),
    Column("outliers, %", lambda row: 100 * row["norms"]["outlier_share"], "{:.2f}"),
    Column("highest norm / median", highest_norm, "{:.2f}"),
    Column("planted 2 % at 5× found, %", lambda row: 100 * row["power"]["0.02"]["5"], "{:.0f}"),
    Column("species from the class token, %", lambda row: class_probe(row, "class"), "{:.1f}"),
    Column("from one register", lambda row: class_probe(row, "register"), "{:.1f}"),
    Column("from one patch", lambda row: class_probe(row, "normal"), "{:.1f}"),
    Column("from one outlier", lambda row: class_probe(row, "outlier"), "{:.1f}"),
    Column("position from a patch, %", lambda row: position_probe(row, "normal"), "{:.1f}"),
    Column("LOST on keys, %", lambda row: 100 * row["dense"]["keys"]["fixed"], "{:.1f}"),
    Column("held-out setting", lambda row: 100 * row["dense"]["keys"]["held_out"], "{:.1f}"),
    Column("LOST on values, %", lambda row: 100 * row["dense"]["values"]["fixed"], "{:.1f}"),
    Column("held-out setting", lambda row: 100 * row["dense"]["values"]["held_out"], "{:.1f}"),
    Column("whole image as box, %", lambda row: 100 * row["dense"]["whole_picture"], "{:.1f}"),
    Column("mIoU, %", lambda row: 100 * row["dense"]["miou"], "{:.1f}"),
    Column("G multiply-adds", lambda row: row["flops"] / 1e9, "{:.3f}"),
    Column("outliers with test-time registers, %", lambda row: outliers_left(row, "after"), "{:.2f}"),
    Column("with random neurons", lambda row: outliers_left(row, "control"), "{:.2f}"),
)

STUDY = Study(
    name="registers",
    question="Do artifact tokens appear in models trained with labels, and what do registers do?",
    data=imagenette_and_pets,
    base={
        "model": "vit_tiny_patch16", "preset": "small", "image_size": 128, "patch_size": 8, "epochs": 12,
        "optimizer": "muon",
    },
    arms=tuple(register_arm(count) for count in COUNTS),
    reference="0 registers",
    monitor=256,
    monitor_every=2,
    measure=measure,
    columns=COLUMNS,
    plot=plot,
    reduced={
        "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8,
        "epochs": 2, "batch_size": 32,
    },
    reduced_data=reduced_images_and_shapes,
)  # fmt: skip
