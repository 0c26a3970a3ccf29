"""Cards for notebooks: a title, a few figures and small pictures, as HTML that needs nothing else.

Text has the color of the notebook, lines and areas are half transparent, and there are no scripts and style sheets,
which viewers remove: a card is readable on light and on dark pages. All text is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vitrail.drawing.theme import ON_ANY_PAGE

COBALT, AMBER = ON_ANY_PAGE["cobalt"], ON_ANY_PAGE["amber"]
FAINT = "#8888"
WIDTH, HEIGHT = 260, 110
"""Size of a chart in pixels."""

SIDE = 112
"""Side of a picture in pixels."""

GRAY = (128, 128, 128)
"""Color of tokens that nothing merged into."""


SOFT = "font-size:11px;opacity:.75"
"""Style of captions."""

NAME, VALUE = "text-align:left;padding:1px 12px 1px 0;opacity:.75", "text-align:left;padding:1px 0"
"""Styles of the cells of a figure."""


def card(title: str, figures: Mapping[str, str], pictures: Sequence[str] = (), note: str = "") -> str:
    """Return a card: a bold title, pictures side by side, figures by name, and a sentence below."""
    cell = '<td style="{}">{}</td>'.format
    rows = "".join(
        f'<tr style="background:none">{cell(NAME, escape(name))}{cell(VALUE, escape(value))}</tr>'
        for name, value in figures.items()
    )
    table = f'<table style="border:0;margin:0;font-size:13px;color:inherit">{rows}</table>' if rows else ""
    parts = "".join(f'<div style="margin:6px 18px 0 0">{part}</div>' for part in (*pictures, table) if part)
    below = f'<div style="font-size:12px;opacity:.75;margin-top:6px">{escape(note)}</div>' if note else ""
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;border:1px solid #8886;border-radius:8px;'
        f'padding:10px 14px;display:inline-block;max-width:760px"><b>{escape(title)}</b>'
        f'<div style="display:flex;flex-wrap:wrap;align-items:flex-start">{parts}</div>{below}</div>'
    )


def picture(image: Any, caption: str = "") -> str:
    """Return a PIL image as an element, enlarged with hard edges, so that a pixel may stand for a patch."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    width, height = image.size
    sides = (SIDE, round(SIDE * height / width)) if width >= height else (round(SIDE * width / height), SIDE)
    return (
        f'<img src="{uri}" alt="{escape(caption, quote=True)}" width="{max(sides[0], 1)}" height="{max(sides[1], 1)}" '
        f'style="image-rendering:pixelated;border-radius:4px;display:block;margin:0"><span style="{SOFT}">'
        f"{escape(caption)}</span>"
    )


def bars(values: Sequence[float], top: float, caption: str, frame: float | None = None) -> str:
    """Return bars from 0 to ``top``, one for each value; ``frame`` draws an outline for what would be there without."""
    step = WIDTH / max(len(values), 1)
    full = 0 if frame is None else _share(frame, top) * HEIGHT
    outline = (
        f'<rect x="0" y="{HEIGHT - full:.1f}" width="{WIDTH}" height="{full:.1f}" fill="{FAINT}"/>' if full else ""
    )
    drawn = "".join(
        f'<rect x="{index * step + step * 0.1:.1f}" y="{HEIGHT - _share(value, top) * HEIGHT:.1f}" '
        f'width="{step * 0.8:.1f}" height="{_share(value, top) * HEIGHT:.1f}" fill="{COBALT}">'
        f"<title>{index}: {value:g}</title></rect>"
        for index, value in enumerate(values)
    )
    return _chart(outline + drawn, caption)


def dots(points: Sequence[tuple[float, float]], chosen: tuple[float, float] | None, caption: str) -> str:
    """Return a scatter plot of points (x, y); the chosen one is marked."""
    every = [*points, *([] if chosen is None else [chosen])]
    every = [point for point in every if all(map(math.isfinite, point))]
    if not every:
        return ""
    scales = []
    for values in zip(*every, strict=True):
        low, high = min(values), max(values)
        scales.append((low, high - low))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = ((value - low) / span if span else 0.5 for value, (low, span) in zip(point, scales, strict=True))
        return 8 + x * (WIDTH - 16), 8 + (1 - y) * (HEIGHT - 16)

    def dot(point: tuple[float, float], radius: int, style: str) -> str:
        x, y = place(point)
        text = f"{point[0]:.4g}, {point[1]:.4g}"
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}><title>{text}</title></circle>'

    drawn = "".join(dot(point, 3, f'fill="{COBALT}"') for point in points if all(map(math.isfinite, point)))
    if chosen is not None and all(map(math.isfinite, chosen)):
        drawn += dot(chosen, 6, f'fill="none" stroke="{AMBER}" stroke-width="2.5"')
    return _chart(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="{FAINT}"/>{drawn}', caption)


def draw_map(values: Any) -> Any:
    """Return a map (h, w) of numbers as a PIL image of one pixel per number, from dark (smallest) to bright."""
    import numpy as np
    from PIL import Image

    from vitrail.drawing.colors import colors

    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return Image.fromarray(colors((array - low) / max(high - low, 1e-12)))


def draw_groups(groups: Any) -> Any:
    """Return groups (h, w) as a PIL image of one pixel per patch: a color for each group, gray where it is alone."""
    import colorsys

    import numpy as np
    from PIL import Image

    _, numbers, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    golden = (math.sqrt(5) - 1) / 2  # neighbors in number are far apart in hue
    palette = np.array(
        [
            GRAY if count == 1 else [round(255 * c) for c in colorsys.hsv_to_rgb(index * golden % 1, 0.65, 0.85)]
            for index, count in enumerate(counts)
        ],
        dtype=np.uint8,
    )
    return Image.fromarray(palette[numbers.reshape(np.shape(groups))])


def _share(value: float, top: float) -> float:
    return min(max(value / top, 0.0), 1.0) if top > 0 and math.isfinite(value) else 0.0


def _chart(inside: str, caption: str) -> str:
    return (
        f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" style="display:block">'
        f'<title>{escape(caption)}</title>{inside}</svg><span style="{SOFT}">{escape(caption)}</span>'
    )
