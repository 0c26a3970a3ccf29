"""Moving shapes: classify shape and motion of clips of 8 frames in 256 patches of space and time."""

from __future__ import annotations

from functools import partial

from experiments.common.datasets import moving_shapes
from experiments.merging.study import merging_study

STUDY = merging_study(
    "sound_and_video/clips",
    "How much accuracy does merging cost for the time that it saves, where patches are of space and time?",
    moving_shapes,
    r=15,
    base={
        "patch_size": (2, 6, 6), "epochs": 40, "batch_size": 128, "augment": "light", "mixup": 0.0, "cutmix": 0.0,
    },
    reduced={"options": {"width": 32, "depth": 2, "heads": 2}, "patch_size": (2, 4, 4), "batch_size": 16},
    reduced_data=partial(moving_shapes, 4, 24, 96),
)  # fmt: skip
