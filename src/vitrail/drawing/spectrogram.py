"""Sounds: a spectrogram with axes, and its groups as stained glass below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.media.sampling import Spectrogram
from vitrail.drawing.colors import colors
from vitrail.drawing.glass import stained_glass
from vitrail.drawing.sheet import INK, PAPER

WIDTH, HEIGHT = 1000, 320
"""Size of a panel in pixels."""

TEXT, TITLE, MARGIN, LEFT, TICK = 18, 22, 20, 96, 7
"""Sizes of letters, of space around the panels and left of them, and of ticks, in pixels."""

PADDING = (52, 50, 56)
"""Color of frames after the end of the sound."""

FREQUENCIES = (50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000)
"""Frequencies that an axis may name, in hertz."""


def draw_sound(values: Any, groups: Any, sampling: Spectrogram) -> Image.Image:
    """Draw a spectrogram and below it its groups, each in the mean color of its cells.

    Args:
        values: (bands, frames), the lowest band first.
        groups: (h, w) integers over the patch grid, stretched over the whole spectrogram.
        sampling: how the spectrogram was computed; it names the axes. Frames that pad a spectrogram of whole windows
            are gray.
    """
    groups, (bands, frames) = np.asarray(groups), np.shape(values)
    panel = spectrogram_image(values, sampling).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)
    glass = stained_glass(panel, groups[::-1])
    titles = ("Spectrogram", f"{len(np.unique(groups))} groups of {groups.size} patches")
    step = 2 * MARGIN + TITLE + HEIGHT + 2 * TEXT
    sheet = Image.new("RGB", (LEFT + WIDTH + 2 * MARGIN, 2 * step), PAPER)
    for number, (title, image) in enumerate(zip(titles, (panel, glass), strict=True)):
        top = number * step + MARGIN + TITLE + MARGIN // 2
        sheet.paste(image, (LEFT, top))
        draw = ImageDraw.Draw(sheet)
        draw.text((LEFT, top - MARGIN // 2), title, INK, ImageFont.load_default(TITLE), anchor="ls")
        _draw_axes(draw, top, bands, frames, sampling)
    return sheet


def spectrogram_image(values: Any, sampling: Spectrogram) -> Image.Image:
    """Return a spectrogram (bands, frames) as an image of one pixel for each value, the lowest band at the bottom."""
    values = np.asarray(values, dtype=np.float64)
    padded = _padded(values) if sampling.whole else np.zeros(values.shape[1], dtype=bool)
    low, high = float(values[:, ~padded].min()), float(values[:, ~padded].max())
    shades = colors((values[::-1] - low) / max(high - low, 1e-12))
    shades[:, padded] = PADDING
    return Image.fromarray(shades)


def frequency_ticks(bands: int, sampling: Spectrogram, space: float = 0.07) -> list[tuple[float, str]]:
    """Return frequencies for an axis, from the lowest, each as a share of the height and a text.

    ``space`` is the least distance between two, as a share.
    """
    found: list[tuple[float, str]] = []
    for hertz in FREQUENCIES:
        share = (sampling.band_of(hertz, bands) + 0.5) / bands
        if 0 < share <= 1 and (not found or share - found[-1][0] > space):
            found.append((share, f"{hertz // 1000} kHz" if hertz >= 1000 else f"{hertz} Hz"))
    return found


def time_ticks(frames: int, sampling: Spectrogram) -> list[tuple[float, str]]:
    """Return round times for an axis, each as a share of the width and a text."""
    seconds = frames * sampling.hop_samples / sampling.rate
    return [(float(time / seconds), text) for time, text in _ticks(seconds)]


def _padded(values: np.ndarray) -> np.ndarray:
    """Return which frames (frames,) follow the end of the sound: the constant ones at the end, if not all are."""
    constant = (values == values[0, -1]).all(0)
    count = int((~constant[::-1]).argmax())
    return np.arange(values.shape[1]) >= values.shape[1] - count


def _draw_axes(draw: ImageDraw.ImageDraw, top: int, bands: int, frames: int, sampling: Spectrogram) -> None:
    font, bottom = ImageFont.load_default(TEXT), top + HEIGHT
    for share, text in frequency_ticks(bands, sampling, 1.2 * TEXT / HEIGHT):
        y = bottom - share * HEIGHT
        draw.line((LEFT - TICK, y, LEFT - 1, y), INK, 2)
        draw.text((LEFT - TICK - 4, y), text, INK, font, anchor="rm")
    for share, text in time_ticks(frames, sampling):
        x = LEFT + share * WIDTH
        draw.line((x, bottom, x, bottom + TICK), INK, 2)
        draw.text((x, bottom + TICK + 4), text, INK, font, anchor="mt")


def _ticks(seconds: float, most: int = 10) -> Iterator[tuple[float, str]]:
    """Yield round times from 0 to a length, at most so many, with their texts."""
    power = 10.0 ** np.floor(np.log10(seconds / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= seconds)
    digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
    for number in range(int(seconds / step + 1e-9) + 1):
        yield number * step, f"{number * step:.{digits}f} s"
