"""Presets: default values for everything that a training recipe decides. Options given explicitly take precedence.

``tiny`` is for quick tests, ``small`` for thousands of images trained from scratch, ``full`` is DeiT's recipe for
large datasets and long runs.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "epochs": 10,  # minutes: enough to see that it learns
        "batch_size": 64,  # many steps from few images
        "lr": 5e-4,  # at this batch size
        "weight_decay": 0.05,  # DeiT
        "warmup_epochs": 1,
        "drop_path": 0.0,  # ten epochs do not overfit
        "smoothing": 0.0,
        "mixup": 0.0,  # mixing pays off in long runs only
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
        "batch_size": 256,  # 37 steps per epoch for ten thousand images
        "lr": 1e-3,  # at this batch size
        "weight_decay": 0.05,  # DeiT
        "warmup_epochs": 5,  # DeiT
        "drop_path": 0.1,  # DeiT
        "smoothing": 0.1,  # DeiT
        "mixup": 0.2,  # a tenth of DeiT's steps supports less mixing
        "cutmix": 1.0,
        "augment": "medium",  # crops, flips and three color augmentations, as in DeiT III
        "crop_min": 0.2,
        "erasing": 0.0,  # CutMix hides enough
        "repeats": 1,
        "ema": None,  # over the last fiftieth of the steps
        "image_size": 128,  # 256 patches of 8 pixels: as many as a ViT/14 has at 224
        "patch_size": 8,
    },
    "full": {
        "epochs": 300,  # this and the rest as in DeiT
        "batch_size": 960,  # DeiT's 1024, rounded to a multiple of the repeats
        "lr": 9.4e-4,  # 5e-4 per 512 images
        "weight_decay": 0.05,
        "warmup_epochs": 5,
        "drop_path": 0.1,
        "smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "augment": "strong",  # in place of RandAugment
        "crop_min": 0.08,
        "erasing": 0.25,
        "repeats": 3,
        "ema": None,  # over the last fiftieth of the steps; DeiT's 0.99996 is for longer runs
        "image_size": None,  # the model's own
        "patch_size": None,
    },
}
"""Values of each preset; None is derived from the model or from the number of steps."""


def batch_for(preset: str, count: int, repeats: int) -> int:
    """Return the preset's batch size, reduced to a power of two that a small dataset fills."""
    batch: int = min(PRESETS[preset]["batch_size"], 1 << max(count.bit_length() - 1, 0))
    return max(batch - batch % (2 * repeats), 1) if repeats > 1 else batch


def lr_for(preset: str, batch: int) -> float:
    """Return the preset's learning rate, scaled by the square root of the batch size, as suits Adam."""
    values = PRESETS[preset]
    return float(values["lr"] * sqrt(batch / values["batch_size"]))


def ema_for(steps: int) -> float:
    """Return the EMA decay that averages over about the last fiftieth of the steps."""
    return min(1 - 1 / max(10.0, steps / 50), 0.9999)
