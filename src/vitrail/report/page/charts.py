"""Charts as SVG: histograms on a logarithmic scale, lines over layers, bars with intervals.

Colors come from ``style.css``, in which ``s0`` and ``s1`` are the first and the second series. A chart is 420 units
wide: readable on a phone, and two of them fit side by side on a desktop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vitrail.report.page.blocks import Block, Note, Shape, Svg
from vitrail.report.page.formatting import number

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 44
BASE = HEIGHT - BOTTOM
FEWEST_TICKS = 3


@dataclass(frozen=True)
class Scale:
    """Map values to positions along an axis, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low * 1e-3)), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return three to eight round values between the ends, if there are any."""
        if not self.log:
            raw = (self.high - self.low) / 4
            if raw <= 0:
                return [self.low]
            power = 10 ** math.floor(math.log10(raw))
            step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= raw * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        if self.high < 3 * self.low:  # too little for round numbers of a logarithmic scale
            return replace(self, log=False).ticks()
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        inside: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
            candidates = [one * 10.0**decade for decade in decades for one in steps]
            inside = [one for one in candidates if self.low * 0.999 <= one <= self.high * 1.001]
            if len(inside) >= FEWEST_TICKS:
                break
        return inside[:: math.ceil(len(inside) / 8)]


class Distribution(NamedTuple):
    """Counts between edges, and the threshold if there is one."""

    edges: Sequence[float]
    counts: Sequence[int]
    threshold: float | None

    @property
    def density(self) -> list[float]:
        """Share of the tokens per factor of ten in norm: comparable between bins of different widths."""
        total = sum(self.counts)
        steps = zip(self.counts, self.edges[:-1], self.edges[1:], strict=True)
        return [many / total / math.log10(right / left) for many, left, right in steps]


def histogram(series: Sequence[Distribution], label: str) -> Block:
    """Draw one or two distributions of norms; both scales are logarithmic."""
    used = [one for one in series if sum(one.counts)]
    if not used:
        return Note("There are no finite norms to draw.")
    single = len(used) == 1
    heights: list[Sequence[float]] = [one.counts if single else one.density for one in used]
    floor = min(0.5 * min(value for value in values if value) for values in heights)
    low, high = min(one.edges[0] for one in used) / 1.05, max(one.edges[-1] for one in used) * 1.05
    x = Scale(low, high, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(floor, max(max(values) for values in heights) * 1.3, BASE, TOP, log=True)
    shapes = _axes(x, y, ("norm of the token", "tokens" if single else "density"))
    for place, (one, values) in enumerate(zip(used, heights, strict=True)):
        outline = [(x(one.edges[0]), float(BASE))]
        for left, right, value in zip(one.edges[:-1], one.edges[1:], values, strict=True):
            top = y(value) if value else BASE
            outline += [(x(left), top), (x(right), top)]
        outline.append((x(one.edges[-1]), BASE))
        shapes.append(Shape("path", {"class": f"area s{place}", "d": _path(outline) + "Z"}))
        if one.threshold is not None:
            text = f"threshold {number(one.threshold)}" if single else f"{'AB'[place]}: {number(one.threshold)}"
            shapes += _vertical_mark(x(one.threshold), text, line=place)
    return Svg("chart", WIDTH, HEIGHT, label, shapes)


class Line(NamedTuple):
    """Values over layers, None for missing ones; the style is a class of the style sheet."""

    style: str
    values: Sequence[float | None]


def over_layers(
    layers: Sequence[float],
    lines: Sequence[Line],
    label: str,
    unit: str,
    *,
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None,
    onset: int | None = None,
    log: bool = True,
    axis: str = "layer",
) -> Block:
    """Draw lines over layers, or over another axis, a band between two lines, and a mark at ``onset``."""
    every = [value for values in (*(line.values for line in lines), *(band or ())) for value in values]
    numbers = [value for value in every if value is not None and math.isfinite(value) and (value > 0 or not log)]
    if not numbers:
        return Note("There are no finite values to draw.")
    low, high = (min(numbers) / 1.15, max(numbers) * 1.15) if log else (0.0, max(max(numbers) * 1.1, 1e-9))
    x = Scale(min(layers), max(max(layers), min(layers) + 1e-9), LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(low, high, BASE, TOP, log=log)
    ticks = list(layers)[:: math.ceil(len(layers) / 12)] if all(isinstance(layer, int) for layer in layers) else None
    shapes = _axes(x, y, (axis, unit), ticks)

    def points(values: Sequence[float | None]) -> list[tuple[float, float]]:
        return [(x(layer), y(value)) for layer, value in zip(layers, values, strict=True) if value is not None]

    if band is not None:
        bottom, top = map(points, band)
        shapes += [Shape("path", {"class": "band", "d": _path([*top, *reversed(bottom)]) + "Z"})] if top else []
    for style, values in lines:
        line = points(values)
        shapes += [Shape("path", {"class": f"line {style}", "d": _path(line)})] if line else []
        for left, height in line:
            shapes.append(_shape("circle", f"dot {style}", cx=left, cy=height, r=2.5))
    if onset is not None:
        shapes += _vertical_mark(x(onset), f"since layer {onset}")
    return Svg("chart", WIDTH, HEIGHT, label, shapes)


class Bar(NamedTuple):
    """A share between 0 and 1, its interval if there is one, and the text behind it."""

    name: str
    share: float
    text: str
    low: float | None = None
    high: float | None = None


def bars(rows: Sequence[Bar], label: str, reference: tuple[float, str] | None = None) -> Svg:
    """Draw shares as bars with intervals, and a vertical line at a reference such as chance."""
    left, right, step = 112, 46, 26
    height = TOP + step * len(rows) + 12
    top = max([row.high or row.share for row in rows] + [row.share for row in rows] + [0.05])
    x = Scale(0, top if top > 0.6 else top * 1.1, left, WIDTH - right)
    shapes: list[Shape] = []
    for place, row in enumerate(rows):
        y, end = TOP + step * place, x(row.share)
        shapes.append(_text(row.name, left - 8, y + 14, "end"))
        shapes.append(_shape("rect", "bar", x=left, y=y + 3, width=max(0.5, end - left), height=15))
        if row.low is not None and row.high is not None:
            shapes.append(_line("interval", x(row.low), y + 10.5, x(row.high), y + 10.5))
            end = max(end, x(row.high))
        shapes.append(_text(row.text, end + 5, y + 14))
    if reference is not None:
        place_x = x(reference[0])
        shapes.append(_line("mark", place_x, TOP - 4, place_x, height - 8))
        shapes.append(_text(reference[1], place_x, TOP - 9, "start" if place_x < WIDTH / 2 else "end", "marked"))
    return Svg("chart", WIDTH, height, label, shapes)


def _axes(x: Scale, y: Scale, names: tuple[str, str], x_ticks: Sequence[float] | None = None) -> list[Shape]:
    shapes = []
    for tick in y.ticks():
        shapes.append(_line("grid", LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        shapes.append(_text(number(tick), LEFT - 6, y(tick) + 4, "end"))
    for tick in x.ticks() if x_ticks is None else x_ticks:
        shapes.append(_line("tick", x(tick), BASE, x(tick), BASE + 4))
        inside = min(x(tick), WIDTH - 3.8 * len(number(tick)))  # half of the text's width, in units
        shapes.append(_text(number(tick), inside, BASE + 17, "middle"))
    shapes.append(_line("axis", LEFT, BASE, WIDTH - RIGHT, BASE))
    shapes.append(_text(names[0], (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", "name"))
    shapes.append(_text(names[1], 4, 14, style="name"))
    return shapes


def _vertical_mark(place: float, text: str, line: int = 0) -> list[Shape]:
    """Draw a vertical line, with text on the side that has room."""
    right = place < (LEFT + WIDTH) / 2 + 60
    words = _text(text, place + (5 if right else -5), 14 + 14 * line, "start" if right else "end", "marked")
    return [_line("mark", place, TOP - 6, place, BASE), words]


def _shape(tag: str, style: str, **places: float) -> Shape:
    return Shape(tag, {"class": style, **{name: f"{place:.1f}" for name, place in places.items()}})


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> Shape:
    return _shape("line", style, x1=x1, y1=y1, x2=x2, y2=y2)


def _text(text: str, x: float, y: float, anchor: str = "start", style: str | None = None) -> Shape:
    return Shape("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": style}, text)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
