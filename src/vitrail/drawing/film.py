"""Clips: stained glass through time, as a film and as a filmstrip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import IO, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.decode import as_rgb
from vitrail.data.media.video import require
from vitrail.drawing.glass import paint
from vitrail.drawing.sheet import INK, PAPER
from vitrail.errors import InvalidOption, UnsupportedInput

SIDE = 480
"""Longer side of a frame in a film, in pixels; smaller frames are enlarged to it."""

SHOWN, TILE, CAPTION, GAP = 8, 300, 20, 12
"""Most frames of a filmstrip, the width of one, the size of its caption, and the space around it, in pixels."""

SLOWEST, FASTEST = 2.0, 25.0
"""Frames per second of a film, at least and at most."""


@dataclass(frozen=True)
class Film:
    """Frames of one size, shown at a rate per second."""

    frames: tuple[Image.Image, ...]
    rate: float
    suffix = ".mp4"

    def save(self, file: IO[bytes]) -> None:
        """Write the film as MP4 (H.264, or MPEG-4 where FFmpeg lacks its encoder)."""
        av: Any = require()
        width, height = (side - side % 2 for side in self.frames[0].size)  # colors are stored at half the resolution
        rate = Fraction(self.rate).limit_denominator(1000)
        with av.open(file, "w", format="mp4") as container:
            codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.bit_rate = 4_000_000
            for number, image in enumerate(self.frames):
                frame = av.VideoFrame.from_image(image.crop((0, 0, width, height)))
                frame.pts, frame.time_base = number, 1 / rate
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


def stained_film(frames: Sequence[Image.Image], groups: Any) -> list[Image.Image]:
    """Paint frames of a clip as stained glass: a group has the mean color of its pixels, over all frames.

    Args:
        frames: images of one size, in time.
        groups: (t, h, w) integers over the patch grid; a step in time holds an equal number of frames.
    """
    cells = np.asarray(groups)
    if cells.ndim != 3 or not cells.size or not np.issubdtype(cells.dtype, np.integer):
        raise UnsupportedInput(f"groups has shape {cells.shape} and dtype {cells.dtype}; expected integers (t, h, w)")
    if not frames or len({frame.size for frame in frames}) > 1:
        raise InvalidOption(f"{len(frames)} frames: expected one or more, all of one size")
    steps = [number * len(cells) // len(frames) for number in range(len(frames))]
    return paint([as_rgb(frame) for frame in frames], cells[steps])


def film(frames: Sequence[Image.Image], groups: Any, times: Sequence[float]) -> Film:
    """Return frames of a clip beside their stained glass, at the speed of the clip.

    ``times`` are the seconds at which the frames are shown.
    """
    large = [_enlarged(frame) for frame in frames]
    pairs = [_beside(*pair) for pair in zip(large, stained_film(large, groups), strict=True)]
    length = times[-1] - times[0] if len(times) > 1 else 0.0
    rate = (len(times) - 1) / length if length > 0 else SLOWEST
    return Film(tuple(pairs), min(max(rate, SLOWEST), FASTEST))


def filmstrip(frames: Sequence[Image.Image], groups: Any, times: Sequence[float]) -> Image.Image:
    """Draw frames of a clip from left to right, their stained glass below them, and their times above.

    Of many frames, one in the middle of each of at most eight equal parts is shown; a group has the mean color over all
    frames.
    """
    size = (TILE, round(frames[0].height * TILE / frames[0].width))
    large = [as_rgb(frame).resize(size, Image.Resampling.LANCZOS) for frame in frames]
    glass = stained_film(large, groups)
    count = min(SHOWN, len(frames))
    shown = [(2 * part + 1) * len(frames) // (2 * count) for part in range(count)]
    step = size[0] + GAP
    sheet = Image.new("RGB", (GAP + count * step, 4 * GAP + CAPTION + 2 * size[1]), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(CAPTION)
    for column, number in enumerate(shown):
        x, y = GAP + column * step, 2 * GAP + CAPTION
        draw.text((x, GAP), f"{times[number]:.2f} s", INK, font)
        sheet.paste(large[number], (x, y))
        sheet.paste(glass[number], (x, y + size[1] + GAP))
    return sheet


def _enlarged(frame: Image.Image) -> Image.Image:
    scale = SIDE / max(frame.size)
    size = (max(round(frame.width * scale), 2), max(round(frame.height * scale), 2))
    return as_rgb(frame).resize(size, Image.Resampling.LANCZOS)


def _beside(one: Image.Image, other: Image.Image) -> Image.Image:
    both = Image.new("RGB", (one.width + GAP + other.width, one.height), PAPER)
    both.paste(one, (0, 0))
    both.paste(other, (one.width + GAP, 0))
    return both
