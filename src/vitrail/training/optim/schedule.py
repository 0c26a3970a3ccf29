"""Learning rate schedule."""

from __future__ import annotations

from math import cos, pi


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay to a fraction ``floor`` of the peak.

    >>> [round(lr_at(step, peak=1.0, warmup=2, total=6, floor=0.0), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return peak * (floor + (1 - floor) * (1 + cos(pi * min(done, 1.0))) / 2)
