"""Groups of merged patches, drawn onto a sample of any medium."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from vitrail._arguments import fitting
from vitrail.data.decode import as_rgb
from vitrail.data.media.audio import Sound
from vitrail.data.media.sampling import Spectrogram
from vitrail.data.media.video import Clip
from vitrail.data.spec import InputSpec
from vitrail.drawing.film import Film, film, filmstrip
from vitrail.drawing.glass import stained_glass
from vitrail.drawing.sheet import contact_sheet
from vitrail.drawing.spectrogram import draw_sound

SIDE = 1600
"""Longest side of an image in the side-by-side view; the stained glass keeps the image's resolution."""

SMALLEST = 768
"""Shortest longer side of an image that is drawn for a person to look at."""


def enlarged(sample: Any) -> Any:
    """Return an image whose longer side has 768 pixels or more; other samples unchanged."""
    if not isinstance(sample, Image.Image) or max(sample.size) >= SMALLEST:
        return sample
    scale = SMALLEST / max(sample.size)
    size = max(round(sample.width * scale), 1), max(round(sample.height * scale), 1)
    return as_rgb(sample).resize(size, Image.Resampling.LANCZOS)


@fitting
def draw_groups(sample: Any, groups: Any, spec: InputSpec) -> dict[str, Image.Image | Film]:
    """Draw the groups (t, h, w) of a sample; return drawings by what they show, the one that stands for all first.

    An image becomes its ``glass`` and a ``side-by-side`` view; a `Clip` a ``filmstrip`` and a ``glass`` film; a `Sound`
    its spectrogram with its ``glass``. There are none for arrays.
    """
    cells = np.asarray(groups)
    if isinstance(sample, Clip):
        times, frames = zip(*sample.seen(spec), strict=True)
        return {"filmstrip": filmstrip(frames, cells, times), "glass": film(frames, cells, times)}
    if isinstance(sample, Sound):
        assert isinstance(spec.sampling, Spectrogram)
        return {"glass": draw_sound(sample.values(spec)[0], cells[0], spec.sampling)}
    if not isinstance(sample, Image.Image):
        return {}
    glass = stained_glass(sample, cells[0])
    sides = [sample.copy(), glass.copy()]
    for side in sides:
        side.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    captions = ["the image", f"{np.unique(cells).size} groups of its {cells.size} patches"]
    return {"glass": glass, "side-by-side": contact_sheet(sides, captions)}
