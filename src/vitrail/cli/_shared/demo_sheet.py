"""The demo's sheet for one image: a column for each merging strength."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.cli._shared.summary import Guesses
from vitrail.report.page.images import colors

PAPER, INK, SOFT, LINE = (251, 249, 245), (38, 36, 42), (112, 108, 116), (226, 221, 212)
LIKELY, CHANGED, TRACK = (247, 203, 128), (240, 168, 152), (241, 237, 229)
MARGIN, GAP, SMALL_GAP = 48, 36, 10
WIDE, TALL = 420, 440
"""Largest size of an image on the sheet."""
TITLE, HEADING, TEXT, NOTE = 34, 24, 18, 16
"""Font sizes."""
BAR = 30
"""Height of a bar with its spacing."""
ACROSS = 3
"""Attention maps in a row."""
DARKEST = 0.75
"""Brightness of a map over black pixels: little is lost, so that colors stay readable."""

LEGEND = (
    "Bars: the most likely classes; red where merging put another class first. Maps: what each special token attends "
    "to, mean over heads, from nothing (violet) to its largest weight (yellow), lightly shaded by the image."
)


Maps = dict[str, NDArray[Any]]
"""Attention of each special token over the patches (h, w), by its name."""


@dataclass(frozen=True)
class Column:
    """One merging strength.

    Attributes:
        image: the original, or its stained glass.
        heading, detail: name and cost.
        guesses: the most likely classes.
        maps: attention maps.
    """

    image: Image.Image
    heading: str
    detail: str
    guesses: Guesses
    maps: Maps


def draw_sheet(title: str, detail: str, columns: Sequence[Column]) -> Image.Image:
    """Draw the columns side by side; the first is the original, which the maps overlay."""
    original = columns[0].image
    image, tile = (
        _fit(original.size, WIDE, TALL),
        _fit(original.size, (WIDE - 2 * SMALL_GAP) // ACROSS, WIDE // ACROSS),
    )
    guesses = columns[0].guesses
    lines = sum(len(best) for best in guesses.values()) + (len(guesses) if len(guesses) > 1 else 0)
    rows = -(-len(columns[0].maps) // ACROSS)
    top = MARGIN + TITLE + NOTE + 3 * SMALL_GAP
    bars = top + image[1] + HEADING + TEXT + 3 * SMALL_GAP
    maps = bars + lines * BAR + 2 * SMALL_GAP
    end = maps + (NOTE + SMALL_GAP + rows * (tile[1] + NOTE + 2 * SMALL_GAP) if rows else 0)
    sheet = Image.new("RGB", (2 * MARGIN + len(columns) * (WIDE + GAP) - GAP, end + NOTE + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (MARGIN, MARGIN), title, TITLE)
    _write(draw, (MARGIN, MARGIN + TITLE + SMALL_GAP), detail, NOTE, SOFT)
    _write(draw, (MARGIN, end), LEGEND if rows else LEGEND.partition(" Maps")[0], NOTE, SOFT)
    for number, column in enumerate(columns):
        x = MARGIN + number * (WIDE + GAP)
        shown = column.image.resize(image, Image.Resampling.LANCZOS)
        sheet.paste(shown, (x + (WIDE - image[0]) // 2, top))
        y = top + image[1] + SMALL_GAP
        _write(draw, (x, y), column.heading, HEADING)
        _write(draw, (x, y + HEADING + SMALL_GAP), column.detail, TEXT, SOFT)
        _draw_guesses(draw, (x, bars), column.guesses, columns[0].guesses)
        if column.maps:
            _draw_maps(sheet, (x, maps), column.maps, original.resize(tile, Image.Resampling.LANCZOS))
    return sheet


def over(image: Image.Image, values: NDArray[Any]) -> Image.Image:
    """Overlay an image with a map (h, w), from zero (violet) to its largest value (yellow)."""
    shades = Image.fromarray(colors(values / max(float(values.max()), 1e-12)))
    heat = np.asarray(shades.resize(image.size, Image.Resampling.NEAREST), dtype=np.float64)
    light = np.asarray(image.convert("L"), dtype=np.float64)[..., None] / 255
    return Image.fromarray(np.rint(heat * (DARKEST + (1 - DARKEST) * light)).astype(np.uint8))


def _draw_guesses(draw: ImageDraw.ImageDraw, place: tuple[int, int], guesses: Guesses, unmerged: Guesses) -> None:
    """Draw a bar for each class by its probability; a new top class has another color."""
    x, y = place
    for question, best in guesses.items():
        if len(guesses) > 1:
            _write(draw, (x, y + SMALL_GAP), question, NOTE, SOFT)
            y += BAR
        for rank, guess in enumerate(best):
            color = CHANGED if rank == 0 and guess.name != unmerged[question][0].name else LIKELY
            high, share = BAR - 5, f"{100 * guess.probability:.1f} %"
            draw.rounded_rectangle((x, y, x + WIDE, y + high), 4, fill=TRACK)
            draw.rounded_rectangle((x, y, x + max(round(WIDE * guess.probability), 4), y + high), 4, fill=color)
            room = WIDE - 3 * SMALL_GAP - _font(NOTE).getlength(share)
            middle = y + high / 2
            draw.text((x + SMALL_GAP, middle), _short(guess.name, NOTE, room), INK, _font(NOTE), anchor="lm")
            draw.text((x + WIDE - SMALL_GAP, middle), share, INK, _font(NOTE), anchor="rm")
            y += BAR


def _draw_maps(sheet: Image.Image, place: tuple[int, int], maps: Maps, image: Image.Image) -> None:
    """Draw the maps in rows, each with the name of its token."""
    draw = ImageDraw.Draw(sheet)
    x, y = place
    draw.line([(x, y - SMALL_GAP), (x + WIDE, y - SMALL_GAP)], LINE)
    _write(draw, (x, y), "attention in the last layer", NOTE, SOFT)
    y += NOTE + SMALL_GAP
    step, space = image.height + NOTE + 2 * SMALL_GAP, (WIDE - 2 * SMALL_GAP) // ACROSS
    for number, (name, values) in enumerate(maps.items()):
        left = x + number % ACROSS * (space + SMALL_GAP)
        upper = y + number // ACROSS * step
        sheet.paste(over(image, values), (left + (space - image.width) // 2, upper))
        middle = (left + space / 2, upper + image.height + SMALL_GAP)
        draw.text(middle, _short(name, NOTE, space), INK, _font(NOTE), anchor="mm")


def _fit(size: tuple[int, int], wide: int, tall: int) -> tuple[int, int]:
    """Return the largest size of the same aspect ratio within a box."""
    scale = min(wide / size[0], tall / size[1])
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def _write(
    draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, color: tuple[int, int, int] = INK
) -> None:
    draw.text((place[0], place[1] + 0.8 * size), _plain(text), color, _font(size), anchor="ls")


def _short(text: str, size: int, room: float) -> str:
    """Shorten a text to a width in pixels."""
    text, font = _plain(text), _font(size)
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}...") > room:
        text = text[:-1]
    return f"{text}..."


def _plain(text: str) -> str:
    """Remove accents, and replace what is not Latin by question marks: Pillow's font has no more."""
    letters = unicodedata.normalize("NFKD", text)
    return "".join(one if one.isascii() else "?" for one in letters if not unicodedata.combining(one))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
