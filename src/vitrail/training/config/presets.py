"""Presets: default values for everything that a training recipe decides. Options given explicitly take precedence.

``tiny`` is for quick tests, ``small`` for thousands of images trained from scratch, ``full`` is DeiT's recipe for
large datasets and long runs, ``finetune`` starts from trained weights and keeps what they know.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

_NAMES = ("tiny", "small", "full", "finetune")
_VALUES: dict[str, tuple[Any, Any, Any, Any]] = {
    "epochs": (10, 100, 300, 5),  # tiny: minutes, enough to see that it learns
    "batch_size": (64, 256, 960, 64),  # many steps from few images; DeiT's 1024, rounded to a multiple of the repeats
    "lr": (5e-4, 1e-3, 9.4e-4, 5e-5),  # at this batch size; DeiT's 5e-4 per 512 images
    "weight_decay": (0.05, 0.05, 0.05, 0.05),
    "warmup_epochs": (1, 5, 5, 1),
    "drop_path": (0.0, 0.1, 0.1, 0.0),  # ten epochs do not overfit
    "smoothing": (0.0, 0.1, 0.1, 0.0),
    "mixup": (0.0, 0.2, 0.8, 0.0),  # mixing pays off in long runs only
    "cutmix": (0.0, 1.0, 1.0, 0.0),
    "augment": ("light", "medium", "strong", "light"),  # crops, flips; DeiT III's three colors; in place of RandAugment
    "crop_min": (0.35, 0.2, 0.08, 0.5),  # small crops are for long runs
    "erasing": (0.0, 0.0, 0.25, 0.0),  # small: CutMix hides enough
    "repeats": (1, 1, 3, 1),
    # over the last fiftieth of the steps, shorter than DeiT's 0.99996; useless for few steps
    "ema": (0.0, None, None, 0.0),
    "image_size": (64, 128, None, None),  # 64 patches fit a CPU; 256 patches are as many as a ViT/14 has at 224
    "patch_size": (8, 8, None, None),
}

ADDED_LR = 1e-2
"""Peak learning rate of tokens added to a trained model, and of their heads: they start from noise."""

GATE_RATE = 10
"""Learning rate of their gates, as a multiple of it: a gate moves by units, other parameters by hundredths."""

OPEN_GATE = 0.0
"""Initial gate of added tokens in training: the weight of other tokens."""

PRESETS = {name: {field: values[i] for field, values in _VALUES.items()} for i, name in enumerate(_NAMES)}
"""Values of each preset; None is derived from the model or from the number of steps. What has no comment is DeiT's."""


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
