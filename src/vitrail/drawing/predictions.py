"""A sheet of predictions for one image: a column for each version of a model, with bars of probabilities, and maps."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitrail.drawing.theme import LIGHT, rgb

PAPER, INK, SOFT, TRACK = (rgb(LIGHT[name]) for name in ("page", "ink", "soft", "rail"))
LIKELY, CHANGED = (243, 196, 112), (238, 158, 160)
"""Amber and ruby, pale enough for text on them."""
MARGIN, GAP, SMALL_GAP = 48, 36, 10
WIDE, TALL = 420, 440
"""Largest size of an image on the sheet."""
TITLE, HEADING, TEXT, NOTE = 34, 24, 18, 16
"""Font sizes."""
BAR = 25
"""Height of a bar."""
ACROSS = 3
"""Maps in a row."""


@dataclass(frozen=True)
class Column:
    """One version of a model.

    Attributes:
        image: the image as this version sees it.
        heading, detail: two lines below it.
        guesses: the most likely classes with their probabilities, in descending order, by label column.
        maps: maps of the image, by name.
    """

    image: Image.Image
    heading: str
    detail: str
    guesses: Mapping[str, Sequence[tuple[str, float]]]
    maps: Mapping[str, Image.Image]


def prediction_sheet(title: str, detail: str, columns: Sequence[Column], legend: str) -> Image.Image:
    """Draw the columns side by side; bars have another color where a class is first that is not in the first column."""
    body = _join([_join(_parts(column, columns[0])) for column in columns], GAP, across=True)
    lines = [_text(title, TITLE, body.width), _text(detail, NOTE, body.width, SOFT)]
    return ImageOps.expand(_join([*lines, body, _text(legend, NOTE, body.width, SOFT)]), MARGIN, PAPER)


def _parts(column: Column, first: Column) -> list[Image.Image]:
    """Draw the parts of a column from top to bottom."""
    image = ImageOps.contain(first.image, (WIDE, TALL), Image.Resampling.LANCZOS)
    shown = Image.new("RGB", (WIDE, image.height), PAPER)
    shown.paste(column.image.resize(image.size, Image.Resampling.LANCZOS), ((WIDE - image.width) // 2, 0))
    parts = [shown, _text(column.heading, HEADING), _text(column.detail, TEXT, color=SOFT)]
    for name, best in column.guesses.items():
        parts += [_text(name, NOTE, color=SOFT)] if len(column.guesses) > 1 else []
        for rank, (label, share) in enumerate(best):
            changed = rank == 0 and label != first.guesses[name][0][0]
            parts.append(_bar(label, share, CHANGED if changed else LIKELY))
    across = min(max(len(column.maps), 2), ACROSS)
    size = (WIDE - (across - 1) * SMALL_GAP) // across
    tiles = []
    for name, drawn in column.maps.items():
        tile = ImageOps.contain(drawn, (size, WIDE // across), Image.Resampling.LANCZOS)
        tiles.append(_join([ImageOps.pad(tile, (size, tile.height), color=PAPER), _text(name, NOTE, size)], 4))
    if tiles:
        parts.append(_text("attention in the last layer", NOTE, color=SOFT))
    return parts + [_join(tiles[start : start + across], across=True) for start in range(0, len(tiles), across)]


def _bar(label: str, share: float, color: tuple[int, int, int]) -> Image.Image:
    """Draw a bar as long as a class is likely."""
    image = Image.new("RGB", (WIDE, BAR), TRACK)
    draw, percent, font = ImageDraw.Draw(image), f"{100 * share:.1f} %", ImageFont.load_default(NOTE)
    draw.rectangle((0, 0, max(round(WIDE * share), 4) - 1, BAR - 1), color)
    room = WIDE - 3 * SMALL_GAP - font.getlength(percent)
    draw.text((SMALL_GAP, BAR / 2), _short(label, NOTE, room), INK, font, anchor="lm")
    draw.text((WIDE - SMALL_GAP, BAR / 2), percent, INK, font, anchor="rm")
    return image


def _text(text: str, size: int, width: int = WIDE, color: tuple[int, int, int] = INK) -> Image.Image:
    image = Image.new("RGB", (width, size + 2), PAPER)
    line = _short(text, size, width)
    ImageDraw.Draw(image).text((0, 0.8 * size), line, color, ImageFont.load_default(size), anchor="ls")
    return image


def _short(text: str, size: int, room: float) -> str:
    """Shorten a text to a width in pixels; replace what is not Latin: Pillow's font has no more."""
    letters = unicodedata.normalize("NFKD", text)
    plain = "".join(one if one.isascii() else "?" for one in letters if not unicodedata.combining(one))
    font, short = ImageFont.load_default(size), plain
    while short and font.getlength(short if short == plain else f"{short}...") > room:
        short = short[:-1]
    return short if short == plain else f"{short}..."


def _join(images: Sequence[Image.Image], gap: int = SMALL_GAP, *, across: bool = False) -> Image.Image:
    """Put images below each other, or side by side."""
    widths, heights = [image.width for image in images], [image.height for image in images]
    gaps = gap * (len(images) - 1)
    size = (sum(widths) + gaps, max(heights)) if across else (max(widths), sum(heights) + gaps)
    joined, place = Image.new("RGB", size, PAPER), 0
    for image in images:
        joined.paste(image, (place, 0) if across else (0, place))
        place += (image.width if across else image.height) + gap
    return joined
