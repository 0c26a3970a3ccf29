"""Colours as they were meant: pixels that come with a colour profile become sRGB."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageCms

_CMS: Any = ImageCms  # Pillow's types for it differ between its versions

_ALIKE = 2
"""Conversions that move no value by more (of 255) are left out: they would only round."""


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert a picture to sRGB by its embedded ICC profile, with its transparency.

    Without a profile, or with one that is damaged or of another kind of picture, the values are taken for sRGB,
    as most programs do. The result carries no profile.
    """
    data = image.info.pop("icc_profile", None)
    if not data:
        return image
    try:
        return _convert(image, data)
    except Exception:  # whatever a strange profile leads to; the pixels are still good
        return image


def _convert(image: Image.Image, data: bytes) -> Image.Image:
    profile = _CMS.ImageCmsProfile(BytesIO(data))
    space = profile.profile.xcolor_space.strip()
    mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}[space]
    if (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and image.mode not in ("1", "L", "LA", "La")):
        return image
    transform = _CMS.buildTransform(
        profile,
        _CMS.createProfile("sRGB"),
        mode,
        "RGB",
        _CMS.Intent.RELATIVE_COLORIMETRIC,
        flags=_CMS.Flags.BLACKPOINTCOMPENSATION,
    )
    if mode != "CMYK" and _changes_nothing(transform, mode):
        return image
    alpha: Image.Image | None = None
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    made: Image.Image = transform.apply(image.convert(mode))
    made.info.pop("icc_profile", None)
    if alpha is not None:
        made.putalpha(alpha)
    return made


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Whether colours from all over the space stay as they are: most profiles are sRGB's own."""
    steps = np.arange(0, 256, 17, dtype=np.uint8)
    colours = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(steps.size, -1, 3)
    probe = Image.fromarray(colours).convert(mode)
    change = np.asarray(transform.apply(probe), dtype=int) - np.asarray(probe.convert("RGB"), dtype=int)
    return bool(np.abs(change).max() <= _ALIKE)
