"""Pictures and maps as data inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, features
from torch import Tensor

Array = npt.NDArray[Any]

LARGEST = 320
"""Longer side, in pixels, of a picture in the page: 8 of them weigh about 200 kB."""

STEPS = 64
"""Colours of a map: one of 37 × 37 patches weighs a third of what it does in full colour."""

# Viridis (Smith and van der Walt, CC0), at ten places: even in lightness, and clear to the colour-blind.
ANCHORS = np.array(
    [
        *([68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142]),
        *([31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]),
    ],
    dtype=np.float64,
)


def photo(image: Tensor) -> str:
    """Give a picture (C, H, W) from 0 to 255 as a data address, made smaller where it is large."""
    array = image.numpy()
    array = np.repeat(array[:1], 3, axis=0) if len(array) < 3 else array[:3]
    made = Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))
    made.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    if features.check("webp"):
        return _address(made, "WEBP", quality=82, method=4)
    return _address(made, "JPEG", quality=85)


def heat(values: Array) -> str:
    """Give a map (h, w) between 0 and 1 as a data address, one pixel a patch, in so many steps of colour."""
    places = np.clip(np.nan_to_num(np.asarray(values, dtype=np.float64)), 0, 1) * (STEPS - 1)
    made = Image.fromarray(np.rint(places).astype(np.uint8))
    made.putpalette(colours(np.linspace(0, 1, STEPS)).tobytes())
    return _address(made, "PNG", optimize=True)


def colour(values: Array) -> str:
    """Give colours (h, w, 3) between 0 and 1 as a data address, one pixel a patch."""
    return _address(Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)), "PNG", optimize=True)


def colours(values: Array) -> npt.NDArray[np.uint8]:
    """Turn numbers between 0 and 1 into red, green and blue."""
    places = np.clip(np.nan_to_num(np.asarray(values, dtype=np.float64)), 0, 1) * (len(ANCHORS) - 1)
    mixed = [np.interp(places, np.arange(len(ANCHORS)), ANCHORS[:, channel]) for channel in range(3)]
    return np.rint(np.stack(mixed, -1)).astype(np.uint8)


def _address(image: Image.Image, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
