"""Sounds: mono samples at any rate, by soundfile and SciPy (``pip install vitrail[audio]``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.media.recording import Recording, library, reason
from vitrail.data.media.sampling import Spectrogram
from vitrail.data.spec import InputSpec
from vitrail.errors import ImageError, MediaError

EXTENSIONS = frozenset({".aif", ".aiff", ".au", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav"})
"""File name extensions of sounds."""

MAX_RATE = 1_000_000
"""Highest rate of a file; the filter that resamples grows with the rate that a header states."""

_FILTER = 10
"""Half the length of SciPy's resampling filter, in samples of the lower rate."""


_CUT = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
"""What libsndfile says of a WAV file whose header promises another length than the file has."""

_STREAMED = 2**31 - 2**16
"""Lengths from here on stand for an unknown one, in files that were written as a stream."""


class Sound(Recording):
    """A sound. Only the part that a model hears is read, so that memory does not grow with its length.

    Example:
        >>> sound = Sound("seven.wav")  # doctest: +SKIP
        >>> sound.seconds, sound.samples(16000).shape  # doctest: +SKIP
        (0.5, torch.Size([8000]))
    """

    modality = "audio"
    noun = "sound"

    def check(self) -> None:
        with self._file() as file:
            self._check_header(file)

    @property
    def seconds(self) -> float:
        """Length of the sound, from its header."""
        with self._file() as file:
            self._check_header(file)
            return float(file.frames / file.samplerate)

    @property
    def rate(self) -> int:
        """Samples per second of the file."""
        with self._file() as file:
            return int(file.samplerate)

    def samples(self, rate: int | None = None, most: int | None = None, *, place: str = "center") -> Tensor:
        """Return the samples (n,) in float32, channels averaged, resampled to a rate; by default the file's own.

        Of a sound with more than ``most`` samples only the part around its center is read, or the part from its
        ``start``; it is the same as that part of the whole sound.
        """
        with self._file() as file:
            self._check_header(file)
            rate = rate or file.samplerate
            common = gcd(rate, file.samplerate)
            up, down = rate // common, file.samplerate // common
            total = ceil(file.frames * up / down)
            most = total if most is None else min(most, total)
            first = (total - most) // 2 if place == "center" else 0
            margin = 0 if up == down else ceil(_FILTER * max(1, down / up)) + 1
            start = max((first * down // up - margin) // down, 0) * down  # where samples of both rates coincide
            stop = min(ceil((first + most) * down / up) + margin, file.frames)
            values = self._read(file, start, stop)
        if up != down:
            signal = library("scipy.signal", "resampling sounds", "audio", "SciPy")
            values = signal.resample_poly(values, up, down).astype(np.float32)
        offset = first - start * up // down
        return torch.from_numpy(np.ascontiguousarray(values[offset : offset + most]))

    def values(self, spec: InputSpec) -> Tensor:
        """Compute the spectrogram (1, bands, frames) in float32."""
        sampling = spec.sampling
        assert isinstance(sampling, Spectrogram)
        bands, frames = spec.size
        sound = self.samples(sampling.rate, sampling.samples(frames), place=sampling.place)
        return sampling.compute(sound, bands, frames)

    def _read(self, file: Any, start: int, stop: int) -> np.ndarray:
        """Read samples (n,), the mean of the channels."""
        file.seek(start)
        values: np.ndarray = file.read(stop - start, dtype="float32", always_2d=True)
        if len(values) < min(stop, file.frames) - start:
            raise MediaError(
                f"{self.name}: {len(values) + start} of {file.frames} samples are there: the {self.noun} is damaged or "
                "cut off; fetch or export it again"
            )
        if not np.isfinite(values).all():
            raise MediaError(f"{self.name}: the {self.noun} has samples that are not finite; repair or export it again")
        return values.mean(1)

    def _check_header(self, file: Any) -> None:
        if file.frames <= 0:
            raise MediaError(f"{self.name}: the {self.noun} has no samples; export it again")
        cut = _CUT.search(file.extra_info)
        if cut is not None and int(cut[2]) < int(cut[1]) < _STREAMED:
            raise MediaError(
                f"{self.name}: {cut[2]} of {cut[1]} bytes of samples are there: the {self.noun} is cut off; fetch or "
                "export it again"
            )
        if file.samplerate > MAX_RATE:
            raise MediaError(
                f"{self.name}: {file.samplerate} samples per second; expected at most {MAX_RATE}. The header may be "
                "damaged: export it again"
            )

    @contextmanager
    def _file(self) -> Iterator[Any]:
        """Open the sound; every error inside becomes a ``MediaError``."""
        soundfile = require()
        content = self.opened()
        try:
            with soundfile.SoundFile(content) as file:
                yield file
        except ImageError:
            raise
        except Exception as error:  # libsndfile's errors are of several kinds
            raise MediaError(
                f"{self.name}: not a {self.noun}, or it is damaged ({reason(error)}); expected wav, flac, mp3 or ogg. "
                "Fetch or export it again"
            ) from error


def require() -> Any:
    """Import soundfile, or raise with the extra that installs it."""
    try:
        return library("soundfile", "reading sounds", "audio", "soundfile")
    except OSError as error:  # libsndfile itself is missing
        raise MediaError(f"reading sounds needs libsndfile ({reason(error)}); pip install vitrail[audio]") from error
