"""Small clips and sounds whose frames and samples are known."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

CLIPS = Path(__file__).parents[3] / "shared" / "data" / "clips"
DIGITS = Path(__file__).parents[3] / "shared" / "data" / "spoken-digits-test.parquet"

real_clips = pytest.mark.skipif(not CLIPS.is_dir(), reason="needs the clips in ../shared/data")
real_digits = pytest.mark.skipif(not DIGITS.is_file(), reason="needs the spoken digits in ../shared/data")


def shade(index: int, count: int) -> int:
    """Return the gray value of a frame of `write_clip`."""
    return round(20 + 200 * index / max(count - 1, 1))


def write_clip(path: Path, count: int = 12, size: tuple[int, int] = (32, 48), rate: int = 10, gap: int = 4) -> Path:
    """Write a clip whose frames grow brighter; a key frame after each ``gap`` frames."""
    av = pytest.importorskip("av", reason="clips need PyAV")
    path.parent.mkdir(parents=True, exist_ok=True)
    codec, pixels = {".gif": ("gif", "rgb8"), ".avi": ("mpeg4", "yuv420p")}.get(path.suffix, ("libx264", "yuv420p"))
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        stream.codec_context.gop_size = gap
        for index in range(count):
            values = np.full((*size, 3), shade(index, count), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def tone(hertz: float, seconds: float = 0.5, rate: int = 16000) -> np.ndarray:
    """Return the samples of a tone."""
    return (0.5 * np.sin(2 * math.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write_sound(path: Path, samples: np.ndarray, rate: int = 16000) -> Path:
    """Write samples (n,) or (n, channels)."""
    soundfile = pytest.importorskip("soundfile", reason="sounds need soundfile")
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate)
    return path
