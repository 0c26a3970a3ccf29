"""Spoken digits: classify the digit from spectrograms of 40 bands and 64 frames in 160 patches."""

from __future__ import annotations

from experiments.common.datasets import digits
from experiments.merging.study import merging_study
from experiments.tasks.sounds.study import reduced_spectrograms

STUDY = merging_study(
    "sound_and_video/sounds",
    "How much accuracy does merging cost for the time that it saves, where patches are of pitch and time?",
    digits,
    r=9,
    base={
        "labels": "digit", "patch_size": (4, 4), "epochs": 40, "batch_size": 128, "mixup": 0.0, "cutmix": 0.0,
    },
    reduced={"options": {"width": 32, "depth": 2, "heads": 2}, "patch_size": (8, 8), "batch_size": 16},
    reduced_data=reduced_spectrograms,
)  # fmt: skip
