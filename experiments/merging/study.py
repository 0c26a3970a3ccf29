"""A ViT with 256 patches, trained with and without merging, each model measured for r from 0 to the cap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from experiments.common.datasets import Data, imagenette, reduced_images
from experiments.common.study import Arm, Column, Study, TrainedModel
from experiments.merging.measure import SECONDS, measure_merging, trained_with
from experiments.merging.report import plot, table
from vitrail.training import Run, read_log

R = 15
PLAIN, WITH = "trained without merging", f"trained with r = {R}"


def measure(run: Run, trained: TrainedModel, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the time of an epoch after warm-up, and the model at every setting."""
    clock = [line["seconds"] for line in read_log(run.folder / "log.jsonl", "epoch")]
    return {
        "epoch_seconds": median(after - before for before, after in pairwise(clock)),
        "trained_with": trained_with(trained.labels),
        "measured": measure_merging(trained.model, trained.labels, trained.data.validation, seconds=seconds),
    }


def merging_study(
    name: str,
    question: str,
    data: Callable[[], Data],
    r: int,
    base: Mapping[str, Any],
    reduced: Mapping[str, Any],
    reduced_data: Callable[[], Data] = reduced_images,
) -> Study:
    """Return a study that trains without merging and with r, and measures each model for r from 0 to the cap."""
    return Study(
        name=name,
        question=question,
        data=data,
        reduced_data=reduced_data,
        base={
            "model": "vit_tiny_patch16", "preset": "small", "optimizer": "muon", "dtype": "bf16-weights", **base,
        },
        arms=(Arm(PLAIN), Arm(f"trained with r = {r}", merge=f"r={r}")),
        reference=PLAIN,
        search={"lr": [1e-3, 3e-3]},
        timed=True,
        measure=measure,
        columns=(
            Column("epoch of training, s", lambda row: row["epoch_seconds"], "{:.3f}"),
            Column("time saved, %", lambda row: None if row["saved"] is None else 100 * row["saved"], "{:.1f}"),
            Column("total with compilation, s", lambda row: row["seconds"], "{:.1f}"),
            Column("peak memory, GiB", lambda row: row["peak_bytes"] and row["peak_bytes"] / 2**30, "{:.2f}"),
        ),
        table=table,
        plot=plot,
        reduced={"preset": "tiny", "epochs": 2, "dtype": "fp32", **reduced},
    )  # fmt: skip


STUDY = merging_study(
    "merging",
    "How much accuracy does merging cost for the time that it saves, off the shelf and trained with it?",
    imagenette,
    r=R,
    base={"image_size": 128, "patch_size": 8, "epochs": 25},
    reduced={
        "options": {"width": 16, "depth": 2, "heads": 1}, "image_size": 32, "patch_size": 4, "batch_size": 32,
    },
)  # fmt: skip
