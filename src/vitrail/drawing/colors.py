"""A map from numbers to colors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Viridis (Smith and van der Walt, CC0) at ten places: even in lightness, and safe for color-blind readers.
VIRIDIS = np.array(
    [
        *([68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142]),
        *([31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]),
    ],
    dtype=np.float64,
)


def colors(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Map numbers between 0 and 1 to red, green and blue (Viridis)."""
    places = np.clip(np.nan_to_num(np.asarray(values, dtype=np.float64)), 0, 1) * (len(VIRIDIS) - 1)
    mixed = [np.interp(places, np.arange(len(VIRIDIS)), VIRIDIS[:, channel]) for channel in range(3)]
    return np.rint(np.stack(mixed, -1)).astype(np.uint8)
