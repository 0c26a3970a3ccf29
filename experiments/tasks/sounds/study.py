"""Digit and speaker of spoken digits: 10 and 6 classes, every pair equally often."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from experiments.common.data import Data, digits
from experiments.common.plots import figure
from experiments.common.sounds import BANDS, FRAMES, HOP, RATE
from experiments.common.study import Rows, Study
from experiments.tasks.asking import asked
from experiments.tasks.showing import by_answering
from vitrail.data import Arrays, Dataset, open_dataset

TASKS = ("digit", "speaker")
SECONDS = FRAMES * HOP / RATE


@cache
def few() -> Data:
    """Some noise, louder at one pitch for each digit, and at one time for each speaker."""

    def opened(count: int, seed: int) -> Dataset:
        sound = torch.randn(count, 1, BANDS, FRAMES, generator=torch.Generator().manual_seed(seed))
        digit, speaker = torch.arange(count) % 4, torch.arange(count) // 4 % 3
        for row in range(count):
            sound[row, :, 10 * digit[row] : 10 * digit[row] + 10] += 1
            sound[row, ..., 20 * speaker[row] : 20 * speaker[row] + 20] += 1
        return open_dataset(Arrays(sound, {"digit": digit, "speaker": speaker}), labels=TASKS, labeled=True)

    return Data(opened(96, 0), opened(48, 1))


def draw(study: Study, rows: Rows, folder: Path) -> None:
    """Draw where the class token and each task's token look by pitch and time, on average over sounds and seeds."""
    found = by_answering(study, rows, "mean_maps")
    grids = {name: np.mean(seeds, axis=0) * rows[0]["patches"] for name, seeds in found.items()}
    most = max(grid.max() for grid in grids.values())
    with figure(folder / "looks.png", columns=len(grids), width=9.0, height=2.6) as sides:
        for axes, (name, grid) in zip(sides, grids.items(), strict=True):
            shown = axes.imshow(
                grid, vmin=0, vmax=most, origin="lower", aspect="auto", cmap="cividis", extent=(0, SECONDS, 0, BANDS)
            )
            axes.set(title=name, xlabel="time, s")
            axes.grid(False)
        sides[0].set_ylabel("pitch, mel bands")
        sides[0].figure.colorbar(shown, ax=sides, label="times even attention")


STUDY = asked(
    "tasks/sounds",
    "Do tokens for digit and speaker look at different patches, and are they better than one class token?",
    TASKS,
    digits,
    few,
    base={"patch_size": (8, 4), "epochs": 40, "batch_size": 128, "mixup": 0.0, "cutmix": 0.0},
    reduced={"patch_size": (8, 8)},
    draw=draw,
)
