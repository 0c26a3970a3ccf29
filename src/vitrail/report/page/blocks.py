"""Parts of a page as plain data. ``templates/blocks.html`` has one macro for each, named in lower case.

Sections return lists of blocks and never write HTML themselves, so that all text is escaped in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, dataclass_transform


@dataclass_transform(frozen_default=True)
class Block:
    """Base of all blocks, which are frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Text(Block):
    """A paragraph, unless the text is empty. Styles: "soft" (less prominent), "strong"."""

    text: str
    style: str = ""


class Takeaway(Block):
    """What a section shows, in one or two sentences, unless the text is empty."""

    text: str


class Note(Block):
    """A remark, such as why there is no number, unless there is none."""

    text: str | None


class Heading(Block):
    """A heading inside a section."""

    text: str


class Bullets(Block):
    """A list. Text between backticks is set as code."""

    items: Sequence[str]


class Table(Block):
    """A table whose first column names the rows. An empty head is left out, and so is a table without rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str


class Key(NamedTuple):
    """An entry of a legend: a class of the style sheet, and its meaning."""

    style: str
    text: str


class Legend(Block):
    """The meaning of lines in a chart or on an image."""

    keys: Sequence[Key]


class Shape(NamedTuple):
    """One SVG element."""

    tag: str
    attributes: Mapping[str, Any]
    text: str = ""


class Svg(Block):
    """A drawing. Styles: "chart", "panel" (an image or a map). ``left`` and ``top`` are where the view begins."""

    style: str
    width: float
    height: float
    label: str
    shapes: Sequence[Shape]
    left: float = 0.0
    top: float = 0.0


class Figure(Block):
    """A chart, or panels side by side, with a caption."""

    content: Sequence[Block]
    caption: str = ""
    keys: Sequence[Key] = ()


class Columns(Block):
    """Blocks side by side where the page is wide enough. Styles: "pair", "images", "images small"."""

    blocks: Sequence[Block]
    style: str = "pair"


class Beside(Block):
    """Charts or tables with their explanation beside them, or below where the page is narrow."""

    charts: Sequence[Block]
    text: Sequence[Block]


class Strip(Block):
    """A row of small panels, each with a few words below."""

    panels: Sequence[tuple[Svg, str]]
    title: str = ""


class Ramp(Block):
    """The color scale of maps, with the values at its ends."""

    label: str
    low: str
    high: str
    colors: Sequence[Sequence[float]]


class Details(Block):
    """Blocks that are hidden until the reader opens them."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class PageSection:
    """A section of a page: id, heading, text of its link in the navigation (empty: no link), blocks."""

    anchor: str
    title: str
    link: str
    blocks: Sequence[Block]
