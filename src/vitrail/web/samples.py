"""The package's samples as the page offers them, each with a small image."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data import Clip, InputSpec, Sound, Spectrogram, samples
from vitrail.data.sample_files import drawings
from vitrail.drawing.spectrogram import spectrogram_image
from vitrail.errors import InvalidOption

MODALITIES = ("image", "video", "audio")

THUMBNAIL = 104
"""Side of the small images of clips and sounds, in pixels."""


class Sample(NamedTuple):
    """A sample: its name, its file, and a small image of it."""

    name: str
    file: str
    data: bytes
    thumbnail: str
    small: bytes


@cache
def samples_of(modality: str) -> tuple[Sample, ...]:
    """Return the samples of a modality; of images the drawings first."""
    found = samples(modality) if modality in DRAW else {**drawings(), **samples()}
    return tuple(_sample(name, path, DRAW.get(modality)) for name, path in found.items())


def save_sample(name: str) -> str:
    """Write a sample into the working directory and return its file name: ``church.png`` for ``"church"``."""
    known = {one.name: one for modality in MODALITIES for one in samples_of(modality)}
    if name not in known:
        raise InvalidOption(f"there is no sample {name!r}; expected one of {', '.join(known)}")
    path = Path(known[name].file).name
    Path(path).write_bytes(known[name].data)
    return path


def _sample(name: str, path: Path, draw: Callable[[Path], Image.Image] | None) -> Sample:
    file, data = f"samples/{path.name}", path.read_bytes()
    if draw is None:
        return Sample(name, file, data, file, data)
    small = io.BytesIO()
    draw(path).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS).save(small, "PNG")
    return Sample(name, file, data, f"samples/{name}.png", small.getvalue())


def _middle_frame(path: Path) -> Image.Image:
    frames = Clip(path.read_bytes(), path.name).seen(InputSpec((3, 64, 64), (0.0,), (1.0,), "video"))
    return frames[1][1]


def _spectrogram(path: Path) -> Image.Image:
    spec = InputSpec((64, 64), (0.0,), (1.0,), "audio")
    return spectrogram_image(Sound(path.read_bytes(), path.name).values(spec)[0], Spectrogram())


DRAW = {"video": _middle_frame, "audio": _spectrogram}
"""Functions that draw the small image of a clip or a sound."""
