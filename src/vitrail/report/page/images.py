"""Images and maps of a page: pixels as data URIs, and panels that draw them with marks on top."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, features
from torch import Tensor

from vitrail.drawing.colors import VIRIDIS, colors
from vitrail.report.page.blocks import Ramp, Shape, Svg
from vitrail.report.page.formatting import number
from vitrail.report.report import ShownImage

Array = npt.NDArray[Any]

LARGEST = 320
"""Longer side of a photo in pixels: 8 of them take about 200 kB."""

STEPS = 64
"""Colors of a map: one of 37 × 37 patches takes a third of its size in full color."""


def photo_uri(pixels: Tensor) -> str:
    """Return an image (C, H, W) from 0 to 255 as a data URI, reduced if it is large."""
    array = pixels.numpy()
    array = np.repeat(array[:1], 3, axis=0) if len(array) < 3 else array[:3]
    image = Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    if features.check("webp"):
        return _data_uri(image, "WEBP", quality=82, method=4)
    return _data_uri(image, "JPEG", quality=85)


def map_uri(values: Array) -> str:
    """Return a map (h, w) between 0 and 1 as a data URI, one pixel per patch."""
    places = np.clip(np.nan_to_num(np.asarray(values, dtype=np.float64)), 0, 1) * (STEPS - 1)
    image = Image.fromarray(np.rint(places).astype(np.uint8))
    image.putpalette(colors(np.linspace(0, 1, STEPS)).tobytes())
    return _data_uri(image, "PNG", optimize=True)


def rgb_uri(values: Array) -> str:
    """Return colors (h, w, 3) between 0 and 1 as a data URI, one pixel per patch."""
    return _data_uri(Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)), "PNG", optimize=True)


def _data_uri(image: Image.Image, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def photos(images: Sequence[ShownImage]) -> list[dict[str, Any]]:
    """Return the attributes of the ``<image>`` elements that hold the photos; panels refer to them by id."""
    return [
        {"id": f"photo{one.index}", "href": photo_uri(one.pixels), **_whole(one)}
        for one in images
        if one.pixels is not None
    ]


def photo_panel(one: ShownImage, label: str, marks: Sequence[Shape] = ()) -> Svg:
    """Draw a photo with marks; a report loaded from JSON has no photos, only marks."""
    photo = [] if one.pixels is None else [Shape("use", {"href": f"#photo{one.index}"})]
    return Svg("panel", one.size[1], one.size[0], label, [*photo, *marks])


def patch_panel(one: ShownImage, patch: int, label: str, around: int) -> Svg:
    """Draw a patch, marked, with some patches to each side; near the border the crop moves inside."""
    (row, column), cell = divmod(patch, one.grid[1]), (one.size[0] / one.grid[0], one.size[1] / one.grid[1])
    sides = [min(2 * around + 1, cells) for cells in one.grid]
    corner = [
        min(max(place - around, 0), cells - side)
        for place, cells, side in zip((row, column), one.grid, sides, strict=True)
    ]
    whole = photo_panel(one, label, outlier_marks(one, [patch]))
    height, width = sides[0] * cell[0], sides[1] * cell[1]
    return replace(whole, width=width, height=height, left=corner[1] * cell[1], top=corner[0] * cell[0])


def map_panel(one: ShownImage, uri: str, label: str, marks: Sequence[Shape] = ()) -> Svg:
    """Draw a map with marks, stretched to the size of the image."""
    drawn = Shape("image", {"href": uri, "class": "map", **_whole(one)})
    return Svg("panel", one.size[1], one.size[0], label, [drawn, *marks])


def weight_panel(one: ShownImage, weights: Any, label: str) -> Svg:
    """Draw attention weights, from zero (dark) to the largest one (bright)."""
    values = np.asarray(weights, dtype=np.float64)
    return map_panel(one, map_uri(values / max(float(values.max()), 1e-12)), label)


class NormColors:
    """A color scale for norms that several images share; logarithmic."""

    def __init__(self, images: Sequence[ShownImage]) -> None:
        every = [norm for one in images for norm in one.norms if norm > 0 and math.isfinite(norm)]
        self.low, high = (min(every), max(every)) if every else (1.0, 2.0)
        self.high = max(high, self.low * 1.5)

    def panel(self, one: ShownImage, label: str, norms: Sequence[float], outliers: Sequence[int]) -> Svg:
        """Draw the norms of an image's patch tokens, outliers marked."""
        values = np.maximum(np.array(norms, dtype=np.float64).reshape(one.grid), self.low)
        uri = map_uri(np.log(values / self.low) / math.log(self.high / self.low))
        return map_panel(one, uri, label, outlier_marks(one, outliers))

    def ramp(self, label: str = "norm") -> Ramp:
        """Draw the scale."""
        return Ramp(label, number(self.low), number(self.high), VIRIDIS.tolist())


def outlier_marks(one: ShownImage, outliers: Sequence[int]) -> list[Shape]:
    """Draw a square around each outlier."""
    height, width = one.size[0] / one.grid[0], one.size[1] / one.grid[1]
    places = [divmod(place, one.grid[1]) for place in outliers]
    path = "".join(f"M{c * width:g} {r * height:g}h{width:g}v{height:g}h{-width:g}z" for r, c in places)
    return [Shape("path", {"d": path, "class": style}) for style in ("casing", "outlier")] if path else []


def box_marks(one: ShownImage, boxes: Mapping[str, Sequence[float]]) -> list[Shape]:
    """Draw boxes (left, top, right, bottom), each in the style of its name, slightly inside of the frame."""
    height, width = one.size
    shapes = []
    for name, (left, top, right, bottom) in boxes.items():
        left, right = max(left, 0.012 * width), min(right, 0.988 * width)
        top, bottom = max(top, 0.012 * height), min(bottom, 0.988 * height)
        sides = {"width": f"{max(right - left, 0):g}", "height": f"{max(bottom - top, 0):g}"}
        for style in ("casing", f"box {name.split()[0]}"):
            shapes.append(Shape("rect", {"class": style, "x": f"{left:g}", "y": f"{top:g}", **sides}))
    return shapes


def _whole(one: ShownImage) -> dict[str, Any]:
    return {"width": one.size[1], "height": one.size[0], "preserveAspectRatio": "none"}
