"""Charts as inline SVG: histograms on a logarithmic scale, lines over layers, bars with intervals.

Colours come from the page's style sheet, so that they fit light and dark. A chart is 420 units wide: its letters can
be read on a telephone, and two of them fit side by side on a desk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.report.markup import Html, tag
from vitrail.report.words import number

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 44


@dataclass(frozen=True)
class Scale:
    """From values to places along an axis; logarithmic or not."""

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
        """Name round values between the ends: three to eight of them, where there are any."""
        if not self.log:
            raw = (self.high - self.low) / 4
            if raw <= 0:
                return [self.low]
            power = 10 ** math.floor(math.log10(raw))
            step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= raw * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        many = len(decades) > 5
        steps: Sequence[float] = (1,) if many else (1, 3) if len(decades) > 2 else (1, 2, 3, 5, 7)
        found = [one * 10.0**decade for decade in decades for one in steps]
        inside = [one for one in found if self.low * 0.999 <= one <= self.high * 1.001]
        return inside[:: math.ceil(len(inside) / 8)] if inside else [self.low, self.high]


def _frame(x: Scale, y: Scale, names: tuple[str, str], x_ticks: Sequence[float] | None = None) -> list[Html]:
    parts = []
    for tick in y.ticks():
        place = f"{y(tick):.1f}"
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place))
        parts.append(tag("text", number(tick), x=LEFT - 6, y=place, dy=4, text_anchor="end"))
    for tick in x.ticks() if x_ticks is None else x_ticks:
        place = f"{x(tick):.1f}"
        parts.append(tag("line", class_="tick", x1=place, x2=place, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4))
        words = number(tick)
        inside = f"{min(x(tick), WIDTH - 3.8 * len(words)):.1f}"  # half of the words' width, in units
        parts.append(tag("text", words, x=inside, y=HEIGHT - BOTTOM + 17, text_anchor="middle"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", names[0], x=middle, y=HEIGHT - 6, text_anchor="middle", class_="name"))
    parts.append(tag("text", names[1], x=4, y=14, class_="name"))
    return parts


def _svg(parts: Any, label: str, height: float = HEIGHT) -> Html:
    return tag("svg", parts, class_="chart", viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def _mark(x: Scale, value: float, words: str, line: int = 0) -> list[Html]:
    """Draw a line upright at a value, with words beside it on the side that has room."""
    place = x(value)
    right = place < (LEFT + WIDTH) / 2 + 60
    return [
        tag("line", class_="mark", x1=f"{place:.1f}", x2=f"{place:.1f}", y1=TOP - 6, y2=HEIGHT - BOTTOM),
        tag(
            "text",
            words,
            x=f"{place + (5 if right else -5):.1f}",
            y=14 + 14 * line,
            class_="marked",
            text_anchor="start" if right else "end",
        ),
    ]


@dataclass(frozen=True)
class Bars:
    """One distribution: counts between edges, and the threshold where there is one."""

    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    threshold: float | None


def histogram(series: Sequence[Bars], label: str) -> Html:
    """Draw distributions over each other: norms and shares of tokens both on logarithmic scales."""
    used = [one for one in series if sum(one.counts)]
    if not used:
        return tag("p", "There are no finite norms to draw.", class_="note")
    low, high = min(one.edges[0] for one in used), max(one.edges[-1] for one in used)
    low, high = low / 1.05, high * 1.05
    single = len(used) == 1
    heights = [list(one.counts) if single else _density(one) for one in used]
    top = max(max(values) for values in heights)
    floor = min(0.5 * min(value for value in values if value) for values in heights)
    x = Scale(low, high, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(floor, top * 1.3, HEIGHT - BOTTOM, TOP, log=True)
    parts = _frame(x, y, ("norm of the token", "tokens" if single else "density"))
    for place, (one, values) in enumerate(zip(used, heights, strict=True)):
        base = HEIGHT - BOTTOM
        path = [f"M{x(one.edges[0]):.1f} {base}"]
        for left, right, many in zip(one.edges[:-1], one.edges[1:], values, strict=True):
            up = y(many) if many else base
            path.append(f"L{x(left):.1f} {up:.1f}L{x(right):.1f} {up:.1f}")
        path.append(f"L{x(one.edges[-1]):.1f} {base}Z")
        parts.append(tag("path", class_=f"area s{place}", d="".join(path)))
        if one.threshold is not None:
            words = f"threshold {number(one.threshold)}" if single else f"{'AB'[place]}: {number(one.threshold)}"
            parts += _mark(x, one.threshold, words, place)
    return _svg(parts, label)


def _density(one: Bars) -> list[float]:
    """Make distributions with bins of different width comparable: share of the tokens per factor of ten in norm."""
    total = sum(one.counts)
    widths = [math.log10(right / left) for left, right in zip(one.edges[:-1], one.edges[1:], strict=True)]
    return [many / total / width for many, width in zip(one.counts, widths, strict=True)]


@dataclass(frozen=True)
class Line:
    """Values over layers: a name, a style (a class of the page's style sheet) and one value each, None for none."""

    name: str
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
    depths: bool = False,
) -> Html:
    """Draw lines over layers, and a band between two of them; ``onset`` is marked."""
    every = [value for line in lines for value in line.values if _drawable(value, log)]
    every += [value for side in band or () for value in side if _drawable(value, log)]
    numbers = [float(value) for value in every if value is not None]
    if not numbers:
        return tag("p", "There is nothing finite to draw.", class_="note")
    low, high = (min(numbers) / 1.15, max(numbers) * 1.15) if log else (0.0, max(max(numbers) * 1.1, 1e-9))
    x = Scale(min(layers), max(max(layers), min(layers) + 1e-9), LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, log=log)
    ticks = None if depths else list(layers)[:: math.ceil(len(layers) / 12)]
    parts = _frame(x, y, ("depth" if depths else "layer", unit), ticks)
    if band is not None:
        pairs = [(layer, a, b) for layer, a, b in zip(layers, *band, strict=True) if a is not None and b is not None]
        up = "L".join(f"{x(layer):.1f} {y(b):.1f}" for layer, _, b in pairs)
        down = "L".join(f"{x(layer):.1f} {y(a):.1f}" for layer, a, _ in reversed(pairs))
        parts.append(tag("path", class_="band", d=f"M{up}L{down}Z") if pairs else Html(""))
    for line in lines:
        points = [(x(layer), y(value)) for layer, value in zip(layers, line.values, strict=True) if value is not None]
        parts.append(
            tag("path", class_=f"line {line.style}", d="M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points))
            if points
            else Html("")
        )
        parts += [tag("circle", class_=f"dot {line.style}", cx=f"{a:.1f}", cy=f"{b:.1f}", r=2.5) for a, b in points]
    if onset is not None:
        parts += _mark(x, onset, f"since layer {onset}")
    return _svg(parts, label)


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


@dataclass(frozen=True)
class Bar:
    """One bar between 0 and 1, its interval where there is one, and what is written behind it."""

    name: str
    share: float
    low: float | None
    high: float | None
    words: str


def bars(rows: Sequence[Bar], label: str, reference: tuple[float, str] | None = None) -> Html:
    """Draw shares as bars with intervals; ``reference`` is a line upright, such as chance."""
    left, right, step = 112, 46, 26
    height = TOP + step * len(rows) + 12
    top = max([row.high or row.share for row in rows] + [row.share for row in rows] + [0.05])
    x = Scale(0, top if top > 0.6 else top * 1.1, left, WIDTH - right)
    parts: list[Html] = []
    for place, row in enumerate(rows):
        y = TOP + step * place
        parts.append(tag("text", row.name, x=left - 8, y=y + 14, text_anchor="end"))
        parts.append(
            tag("rect", class_="bar", x=left, y=y + 3, width=f"{max(0.5, x(row.share) - left):.1f}", height=15)
        )
        end = x(row.share)
        if row.low is not None and row.high is not None:
            middle, end = y + 10.5, max(end, x(row.high))
            span = {"x1": f"{x(row.low):.1f}", "x2": f"{x(row.high):.1f}", "y1": middle, "y2": middle}
            parts.append(tag("line", class_="interval", **span))
        parts.append(tag("text", row.words, x=f"{end + 5:.1f}", y=y + 14))
    if reference is not None:
        at, side = f"{x(reference[0]):.1f}", "start" if x(reference[0]) < WIDTH / 2 else "end"
        parts.append(tag("line", class_="mark", x1=at, x2=at, y1=TOP - 4, y2=height - 8))
        parts.append(tag("text", reference[1], x=at, y=TOP - 9, class_="marked", text_anchor=side))
    return _svg(parts, label, height)
