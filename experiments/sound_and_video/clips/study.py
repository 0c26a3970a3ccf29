"""Moving shapes: clips of 8 frames in 256 patches of space and time, which shape moves which way?"""

from __future__ import annotations

from functools import partial

from experiments.common.data import moving_shapes
from experiments.sound_and_video.asking import asked

STUDY = asked(
    "sound_and_video/clips",
    "How much accuracy does merging cost for the time that it saves, where patches are of space and time?",
    moving_shapes,
    partial(moving_shapes, 4, 24, 96),
    r=15,
    base={"patch_size": (2, 6, 6), "epochs": 40, "batch_size": 128, "augment": "light"},
    reduced={"patch_size": (2, 4, 4)},
)
