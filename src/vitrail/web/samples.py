"""Samples that the page offers: images of the package; clips and sounds are made here."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data import InputSpec, Sound, Spectrogram, read_image, samples
from vitrail.data.decode import center_crop
from vitrail.data.sample_images import drawings
from vitrail.drawing.film import Film
from vitrail.drawing.spectrogram import spectrogram_image
from vitrail.errors import InvalidOption

SIDE, FRAMES, FRAME_RATE = 224, 24, 12.0
"""Height and width of the sample clips in pixels, their number of frames, and frames per second."""

THUMBNAIL = 104
"""Side of the small images of clips and sounds, in pixels."""

SAMPLE_RATE = 16_000
"""Samples per second of the sample sounds."""


class Sample(NamedTuple):
    """A sample: its name, its file, and a small image of it."""

    name: str
    file: str
    data: bytes
    thumbnail: str
    small: bytes


@cache
def samples_of(modality: str) -> tuple[Sample, ...]:
    """Return the samples of a modality."""
    return tuple(MAKERS[modality]())


def save_sample(name: str) -> str:
    """Write a sample into the working directory and return its file name: ``church.png`` for ``"church"``."""
    one = next((one for modality in MAKERS for one in samples_of(modality) if one.name == name), None)
    if one is None:
        known = [one.name for modality in MAKERS for one in samples_of(modality)]
        raise InvalidOption(f"there is no sample {name!r}; expected one of {', '.join(known)}")
    path = Path(one.file).name
    Path(path).write_bytes(one.data)
    return path


def _images() -> Iterator[Sample]:
    for name, path in {**drawings(), **samples()}.items():
        file, data = f"samples/{path.name}", path.read_bytes()
        yield Sample(name, file, data, file, data)


def _clips() -> Iterator[Sample]:
    """Return a camera that moves over a photograph, one that comes closer, and a ball that moves in front of one."""
    steps = np.linspace(0, 1, FRAMES)
    pan, cat, still = (read_image(samples()[name]) for name in ("astronaut", "chelsea", "coffee"))
    room = pan.width - pan.height * 2 // 3
    side = pan.height * 2 // 3
    panned = [pan.crop((round(room * at), 0, round(room * at) + side, side)) for at in steps]
    zoomed = [_zoomed(cat, 1 - 0.6 * at) for at in steps]
    clips = {"pan": panned, "zoom": zoomed, "ball": [_with_ball(still, at) for at in steps]}
    for name, frames in clips.items():
        yield _sample(name, "mp4", _film(frames), frames[FRAMES // 2])


def _zoomed(image: Image.Image, share: float) -> Image.Image:
    side = round(share * min(image.size))
    left, top = (image.width - side) // 2, (image.height - side) // 3
    return image.crop((left, top, left + side, top + side))


def _with_ball(image: Image.Image, at: float) -> Image.Image:
    frame = center_crop(image, (SIDE, SIDE))
    x, y = 20 + at * (SIDE - 60), SIDE - 50 - 130 * abs(np.sin(2.5 * np.pi * at))
    ImageDraw.Draw(frame).ellipse((x, y, x + 40, y + 40), (210, 40, 50), (90, 10, 20), 2)
    return frame


def _film(frames: list[Image.Image]) -> bytes:
    file = io.BytesIO()
    Film(tuple(frame.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for frame in frames), FRAME_RATE).save(file)
    return file.getvalue()


def _sounds() -> Iterator[Sample]:
    """Return a scale, strokes of a bell, and a chirp that rises."""
    times = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    note = np.minimum((times * 8).astype(int), 7)
    pitch = 262 * 2 ** (np.array([0, 2, 4, 5, 7, 9, 11, 12])[note] / 12)
    fade = np.exp(-6 * (times * 8 - note))
    scale = sum(fade * np.sin(2 * np.pi * order * pitch * times) / order for order in (1, 2, 3, 4))
    strokes = np.mod(times, 0.5)
    parts = ((1.0, 4.0), (2.0, 5.0), (2.76, 7.0), (5.4, 10.0))
    bell = sum(np.exp(-fall * strokes) * np.sin(2 * np.pi * 620 * order * times) for order, fall in parts)
    chirp = np.sin(2 * np.pi * (300 * times + 1500 * times**2)) * np.sin(np.pi * times)
    seen = InputSpec((64, 100), (0.0,), (1.0,), "audio")
    for name, values in {"scale": scale, "bell": bell, "chirp": chirp}.items():
        data = _wav(values)
        spectrogram = Sound(data, name).values(seen)[0]
        yield _sample(name, "wav", data, spectrogram_image(spectrogram, Spectrogram()))


def _sample(name: str, ending: str, data: bytes, image: Image.Image) -> Sample:
    file = io.BytesIO()
    image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS).save(file, "PNG")
    return Sample(name, f"samples/{name}.{ending}", data, f"samples/{name}.png", file.getvalue())


def _wav(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes((32_000 * values / np.abs(values).max()).astype("<i2").tobytes())
    return file.getvalue()


MAKERS = {"image": _images, "video": _clips, "audio": _sounds}
"""Functions that yield the samples, by modality."""
