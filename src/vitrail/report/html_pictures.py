"""Pictures in the page: photographs with marks, maps beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.report import images
from vitrail.report.markup import Html, figure, note, tag
from vitrail.report.shown import Shown
from vitrail.report.words import count, number

NO_PICTURES = "No picture can be shown: none has numbers that are all finite."


def photos(pictures: Sequence[Shown]) -> Html:
    """Store every photograph once; panels refer to it."""
    stored = [
        tag(
            "image",
            id=f"photo{one.index}",
            href=images.photo(one.image),
            width=one.size[1],
            height=one.size[0],
            preserveAspectRatio="none",
        )
        for one in pictures
        if one.image is not None
    ]
    return tag("svg", tag("defs", stored), width=0, height=0, style="position:absolute", aria_hidden="true")


def photo_panel(one: Shown, label: str, marks: Any = None) -> Html:
    """Draw a photograph with marks."""
    shown = tag("use", href=f"#photo{one.index}") if one.image is not None else None
    return _panel(one, label, [shown, marks])


def map_panel(one: Shown, address: str, label: str, marks: Any = None) -> Html:
    """Draw a map of one pixel a patch."""
    size = {"width": one.size[1], "height": one.size[0]}
    drawn = tag("image", href=address, class_="map", preserveAspectRatio="none", **size)
    return _panel(one, label, [drawn, marks])


def _panel(one: Shown, label: str, content: Any) -> Html:
    view = f"0 0 {one.size[1]} {one.size[0]}"
    return tag("svg", content, class_="panel", viewBox=view, role="img", aria_label=label)


def weight_panel(one: Shown, weights: Any, label: str) -> Html:
    """Draw a map of attention, from nothing (dark) to its own largest weight (bright)."""
    values = np.asarray(weights, dtype=np.float64)
    return map_panel(one, images.heat(values / max(float(values.max()), 1e-12)), label)


def strip(panels: Sequence[tuple[Html, Any]]) -> Html:
    """Put small panels in a row, each with a few words below; a narrow page has several rows."""
    return tag("div", [tag("div", panel, tag("span", words)) for panel, words in panels], class_="strip")


def outlier_marks(one: Shown, outliers: Sequence[int] | None = None) -> list[Html]:
    """Draw a square around each outlier."""
    height, width = one.size[0] / one.grid[0], one.size[1] / one.grid[1]
    places = [divmod(place, one.grid[1]) for place in (one.outliers if outliers is None else outliers)]
    path = "".join(f"M{c * width:g} {r * height:g}h{width:g}v{height:g}h{-width:g}z" for r, c in places)
    return [tag("path", d=path, class_="casing"), tag("path", d=path, class_="outlier")] if path else []


def box_marks(one: Shown, boxes: Mapping[str, Sequence[float]]) -> list[Html]:
    """Draw boxes (left, top, right, bottom), each in its own colour and dashes, and a little inside of the frame."""
    height, width = one.size
    found = []
    for name, (left, top, right, bottom) in boxes.items():
        left, right = max(left, 0.012 * width), min(right, 0.988 * width)
        top, bottom = max(top, 0.012 * height), min(bottom, 0.988 * height)
        sides = max(right - left, 0), max(bottom - top, 0)
        place = {"x": f"{left:g}", "y": f"{top:g}", "width": f"{sides[0]:g}", "height": f"{sides[1]:g}"}
        found += [tag("rect", class_="casing", **place), tag("rect", class_=f"box {name.split()[0]}", **place)]
    return found


def title(one: Shown) -> str:
    """Name a picture, with its label."""
    return one.name if one.label is None else f"{one.name} ({one.label})"


def norm_scale(pictures: Sequence[Shown]) -> tuple[float, float]:
    """Give the ends of the colours of norm maps, which all pictures share."""
    every = [norm for one in pictures for norm in one.norms if norm > 0 and math.isfinite(norm)]
    low, high = (min(every), max(every)) if every else (1.0, 2.0)
    return low, max(high, low * 1.5)


def norm_map(one: Shown, low: float, high: float, norms: Sequence[float] | None = None) -> str:
    """Give a picture's norms (or others) as colours, on a logarithmic scale."""
    given = np.array(one.norms if norms is None else norms, dtype=np.float64)
    found = np.maximum(given.reshape(one.grid), low)
    return images.heat(np.log(found / low) / math.log(high / low))


def ramp(low: str, high: str, words: str) -> Html:
    """Draw the scale of the colours."""
    stops = ",".join("rgb({:.0f},{:.0f},{:.0f})".format(*anchor) for anchor in images.ANCHORS)
    bar = tag("i", style=f"background:linear-gradient(90deg,{stops})", role="img", aria_label=words)
    return tag("div", words, " ", low, bar, high, class_="ramp")


def norm_part(pictures: Sequence[Shown], norms: Mapping[str, Any]) -> list[Html]:
    """Show norm maps beside pictures, outliers marked."""
    if not pictures:
        return [note(NO_PICTURES)]
    low, high = norm_scale(pictures)
    figures = []
    for one in pictures:
        marks = outlier_marks(one)
        many = "" if norms["threshold"] is None else f": {count(len(one.outliers), 'outlier')}"
        panels = [
            photo_panel(one, f"{title(one)}{many}", marks),
            map_panel(one, norm_map(one, low, high), f"Norms of the patch tokens of {one.name}", marks),
        ]
        figures.append(figure(tag("div", panels, class_="panels"), [title(one), many]))
    if norms["threshold"] is None:
        words = "No token stands above the others, so none is marked."
    else:
        kind = "outliers" if norms["verdict"] == "artifacts" else "candidates"
        words = (
            f"Pink squares are {kind}: tokens with a norm above {number(norms['threshold'])}. Some of the pictures "
            "are those with the most of them, the others are spread over the data. "
            f"{count(norms['pictures_with_outliers'], 'picture')} of {norms['num_pictures']:,} have at least one."
        )
    return [
        tag(
            "p",
            "Left the picture as the model sees it, right the norm of each patch token after the last layer. ",
            words,
        ),
        ramp(number(low), number(high), "norm"),
        tag("div", figures, class_="pictures"),
    ]
