"""Presets: one word for everything that a recipe has to decide. What is given by hand wins over them.

``tiny`` is for trying things out, ``small`` for some thousands of pictures trained from nothing, ``full`` is DeiT's
recipe for large sets and long runs.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "epochs": 10,  # minutes: enough to see that it learns
        "batch_size": 64,  # many steps from few pictures
        "lr": 5e-4,  # at this batch
        "weight_decay": 0.05,  # DeiT's
        "warmup_epochs": 1,
        "drop_path": 0.0,  # ten epochs do not overfit
        "smoothing": 0.0,
        "mixup": 0.0,  # mixed pictures pay off in long runs only
        "cutmix": 0.0,
        "augment": "light",  # crops and flips
        "crop_min": 0.35,  # small crops are for long runs
        "erasing": 0.0,
        "repeats": 1,
        "ema": 0.0,  # an average over so few steps would lag behind
        "image_size": 64,  # 64 patches of 8 pixels: fits a CPU
        "patch_size": 8,
    },
    "small": {
        "epochs": 100,
        "batch_size": 256,  # 37 steps an epoch for ten thousand pictures
        "lr": 1e-3,  # at this batch
        "weight_decay": 0.05,  # DeiT's
        "warmup_epochs": 5,  # DeiT's
        "drop_path": 0.1,  # DeiT's
        "smoothing": 0.1,  # DeiT's
        "mixup": 0.2,  # a tenth of DeiT's time cannot undo as much mixing
        "cutmix": 1.0,  # labels by area teach where things are
        "augment": "medium",  # three augmentations of colour beside crops and flips, as in DeiT III
        "crop_min": 0.2,  # a fifth of the picture at least still shows what it is
        "erasing": 0.0,  # cutmix hides enough
        "repeats": 1,
        "ema": None,  # over the last fiftieth of the steps
        "image_size": 128,  # 256 patches of 8 pixels: as many as a ViT/14 has at 224
        "patch_size": 8,
    },
    "full": {
        "epochs": 300,  # this and the rest is DeiT's
        "batch_size": 960,  # DeiT's 1024, made a multiple of the repeats
        "lr": 9.4e-4,  # 5e-4 for each 512 pictures
        "weight_decay": 0.05,
        "warmup_epochs": 5,
        "drop_path": 0.1,
        "smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "augment": "strong",  # in the place of RandAugment
        "crop_min": 0.08,
        "erasing": 0.25,
        "repeats": 3,
        "ema": None,  # over the last fiftieth of the steps; DeiT's 0.99996 is for longer runs
        "image_size": None,  # the model's own
        "patch_size": None,
    },
}
"""What each preset stands for; ``None`` is derived from the model or from the number of steps."""


def batch_for(preset: str, count: int, repeats: int) -> int:
    """Give the preset's batch; of a small set the largest power of two that it fills, as the repeats allow."""
    batch: int = min(PRESETS[preset]["batch_size"], 1 << max(count.bit_length() - 1, 0))
    return max(batch - batch % (2 * repeats), 1) if repeats > 1 else batch


def lr_for(preset: str, batch: int) -> float:
    """Give the preset's learning rate for a batch: it grows with the square root, as suits Adam."""
    values = PRESETS[preset]
    return float(values["lr"] * sqrt(batch / values["batch_size"]))


def ema_for(steps: int) -> float:
    """Give the decay that averages over about the last fiftieth of the steps."""
    return min(1 - 1 / max(10.0, steps / 50), 0.9999)
