"""Spoken digits: spectrograms of 40 bands and 64 moments in 160 patches, which digit is it?"""

from __future__ import annotations

from experiments.common.data import digits
from experiments.sound_and_video.asking import asked
from experiments.tasks.sounds.study import few

STUDY = asked(
    "sound_and_video/sounds",
    "How much accuracy does merging cost for the time that it saves, where patches are of pitch and time?",
    digits,
    few,
    r=9,
    base={"labels": "digit", "patch_size": (4, 4), "epochs": 40, "batch_size": 128},
    reduced={"patch_size": (8, 8)},
)
