"""Cards: well-formed, escaped, self-contained, and drawn to scale."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from vitrail.drawing.notebook import FAINT, GRAY, HEIGHT, WIDTH, bars, card, dots, draw_groups, draw_map, picture

VOID = {"img", "br"}


class Checker(HTMLParser):
    """Reads HTML, raises where tags are not closed in order, and collects text and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_card(html: str, limit: int = 20_000) -> Checker:
    """Check what every card promises; return its parts."""
    found = Checker(html)
    assert len(html) < limit
    tags = {tag for tag, _, _ in found.attributes}
    assert tags <= {"div", "table", "tr", "td", "svg", "rect", "circle", "img", "span", "title"}
    for _, name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith("data:image/png;base64,")
        if name == "style":  # the text has the page's color, so that it is readable on light and on dark ones
            assert not re.search(r"(?<!-)\bcolor:(?!inherit)|background:(?!none)|url\(", value)
    return found


def values(found: Checker, tag: str, name: str) -> list[float]:
    return [float(value) for kind, key, value in found.attributes if (kind, key) == (tag, name)]


def test_text_is_escaped() -> None:
    evil = '<script>alert("1")</script>&'
    image = Image.new("RGB", (2, 1))
    pictures = [picture(image, evil), bars([1.0], 2.0, evil), dots([(1.0, 2.0)], None, evil)]
    found = check_card(card(evil, {evil: evil}, pictures, evil))
    assert found.text.count(evil) == 9
    assert [value for _, name, value in found.attributes if name == "alt"] == [evil]


def test_bars_are_to_scale() -> None:
    found = Checker(bars([10.0, 5.0, 0.0, float("nan")], 20.0, "caption", frame=20.0))
    heights = values(found, "rect", "height")
    assert heights == pytest.approx([HEIGHT, HEIGHT / 2, HEIGHT / 4, 0, 0])
    tops = values(found, "rect", "y")
    assert [top + height for top, height in zip(tops, heights, strict=True)] == pytest.approx([HEIGHT] * 5)
    assert next(value for kind, name, value in found.attributes if (kind, name) == ("rect", "fill")) == FAINT


def test_dots_rise_with_their_values_and_stay_inside() -> None:
    found = Checker(dots([(0.0, 5.0), (1.0, 7.0), (2.0, 9.0), (float("nan"), 1.0)], (1.0, 7.0), "caption"))
    x, y = values(found, "circle", "cx"), values(found, "circle", "cy")
    assert x == [*sorted(x[:3]), x[1]]
    assert y == [*sorted(y[:3], reverse=True), y[1]]
    assert 0 < min(x) < max(x) < WIDTH
    assert 0 < min(y) < max(y) < HEIGHT
    assert dots([], None, "") == dots([(float("inf"), 1.0)], None, "") == ""


def test_maps_and_groups_have_a_pixel_for_each_patch() -> None:
    dark, bright = (np.asarray(draw_map([[1.0, 3.0], [np.nan, 2.0]]))[0, i].tolist() for i in (0, 1))
    assert (dark, bright) == ([68, 1, 84], [253, 231, 37])
    groups = np.array([[7, 7, 2], [3, 9, 9]])
    drawn = np.asarray(draw_groups(groups))
    assert drawn.shape == (2, 3, 3)
    colors = {tuple(drawn[place]) for place in ((0, 0), (1, 1))}
    assert len(colors) == 2
    assert (drawn[0, 0] == drawn[0, 1]).all()
    assert tuple(drawn[0, 2]) == tuple(drawn[1, 0]) == GRAY
    uri = re.search(r'src="data:image/png;base64,([^"]+)"', picture(Image.fromarray(drawn)))[1]
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(uri)))) == drawn).all()
