"""A ViT with 256 patches, trained with and without merging, each model measured for r from 0 to the cap."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

from experiments.common.data import imagenette
from experiments.common.study import Arm, Column, Study, Trained
from experiments.merging.measuring import SECONDS, measure_merging, trained_with
from experiments.merging.showing import draw, table
from vitrail.training import Run, read_log

R = 15
PLAIN, WITH = "trained without merging", f"trained with r = {R}"


def look(run: Run, trained: Trained, seconds: float = SECONDS) -> dict[str, Any]:
    """Note how long an epoch took once all was running, and measure the model at every setting, in one go."""
    clock = [line["seconds"] for line in read_log(run.folder / "log.jsonl", "epoch")]
    return {
        "epoch_seconds": median(after - before for before, after in pairwise(clock)),
        "trained_with": trained_with(trained.labels),
        "measured": measure_merging(trained.model, trained.labels, trained.data.validation, seconds=seconds),
    }


STUDY = Study(
    name="merging",
    question="How much accuracy does merging cost for the time that it saves, off the shelf and trained with it?",
    data=imagenette,
    base={
        "model": "vit_tiny_patch16", "preset": "small", "image_size": 128, "patch_size": 8, "epochs": 25,
        "optimizer": "muon", "dtype": "bf16-weights",
    },
    arms=(Arm(PLAIN), Arm(WITH, merge=f"r={R}")),
    reference=PLAIN,
    search={"lr": [1e-3, 3e-3]},
    timed=True,
    look=look,
    columns=(
        Column("an epoch of training, s", lambda row: row["epoch_seconds"], "{:.3f}"),
        Column("saved, %", lambda row: None if row["saved"] is None else 100 * row["saved"], "{:.1f}"),
        Column("all of it, with compiling, s", lambda row: row["seconds"], "{:.1f}"),
        Column("peak memory, GiB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 2**30, "{:.2f}"),
    ),
    table=table,
    draw=draw,
    reduced={
        "options": {"width": 16, "depth": 2, "heads": 1}, "preset": "tiny", "image_size": 32, "patch_size": 4,
        "epochs": 2, "batch_size": 32, "dtype": "fp32",
    },
)  # fmt: skip
