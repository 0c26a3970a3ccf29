"""Digit and speaker of spoken digits: 10 and 6 classes, every pair equally often."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from experiments.common.datasets import Data, digits
from experiments.common.plots import figure
from experiments.common.spectrograms import BANDS, FRAMES, HOP, RATE
from experiments.common.study import Rows, Study
from experiments.tasks.report import by_task_token
from experiments.tasks.two_tasks import two_task_study
from vitrail.data import Arrays, Dataset, open_dataset

TASKS = ("digit", "speaker")
SECONDS = FRAMES * HOP / RATE


@cache
def reduced_spectrograms() -> Data:
    """Generate noise that is louder in one frequency band for each digit, and at one time for each speaker."""

    def opened(count: int, seed: int) -> Dataset:
        samples = torch.randn(count, 1, BANDS, FRAMES, generator=torch.Generator().manual_seed(seed))
        digit, speaker = torch.arange(count) % 4, torch.arange(count) // 4 % 3
        for row in range(count):
            samples[row, :, 10 * digit[row] : 10 * digit[row] + 10] += 1
            samples[row, ..., 20 * speaker[row] : 20 * speaker[row] + 20] += 1
        return open_dataset(Arrays(samples, {"digit": digit, "speaker": speaker}), labels=TASKS, labeled=True)

    return Data(opened(96, 0), opened(48, 1))


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Show the mean attention maps of the class token and each task token over frequency and time."""
    maps = by_task_token(study, rows, "mean_maps")
    grids = {name: np.mean(seeds, axis=0) * rows[0]["patches"] for name, seeds in maps.items()}
    largest = max(grid.max() for grid in grids.values())
    with figure(folder / "attention.png", columns=len(grids), width=9.0, height=2.6) as panels:
        for axes, (name, grid) in zip(panels, grids.items(), strict=True):
            shown = axes.imshow(
                grid, vmin=0, vmax=largest, origin="lower", aspect="auto", extent=(0, SECONDS, 0, BANDS)
            )
            axes.set(title=name, xlabel="time, s")
            axes.grid(False)
        panels[0].set_ylabel("mel band")
        panels[0].figure.colorbar(shown, ax=panels, label="attention / uniform")


STUDY = two_task_study(
    "tasks/sounds",
    "Do tokens for digit and speaker attend to different patches, and are they better than one class token?",
    TASKS,
    digits,
    reduced_spectrograms,
    base={"patch_size": (8, 4), "epochs": 40, "batch_size": 128, "mixup": 0.0, "cutmix": 0.0},
    reduced={"patch_size": (8, 8)},
    plot=plot,
)
