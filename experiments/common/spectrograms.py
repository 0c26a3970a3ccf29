"""Log-mel spectrograms of spoken digits."""

from __future__ import annotations

import io
import tarfile
import wave
from math import log10
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data import Arrays
from vitrail.errors import ImageError

RATE = 8000
WINDOW, HOP, BANDS, FRAMES = 256, 100, 40, 64
"""Samples per window and between windows, mel bands, and windows per spectrogram (0.8 seconds)."""


def read_digits(path: Path) -> Arrays:
    """Read a parquet file with the columns ``audio`` (WAV bytes), ``digit`` and ``speaker``.

    A tar file of recordings named ``DIGIT_SPEAKER_TAKE.wav`` is read without pyarrow.
    """
    if path.suffix == ".tar":
        return _read_tar(path)
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        table = parquet.read_table(path, columns=["audio", "digit", "speaker"])
        recordings = [read_wave(one["bytes"]) for one in table["audio"].to_pylist()]
        labels = {name: [str(value) for value in table[name].to_pylist()] for name in ("digit", "speaker")}
    except (OSError, EOFError, ValueError, KeyError, TypeError, wave.Error, ArrowException) as error:
        why = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise ImageError(
            f"{path} is not a parquet file of recordings, or is damaged ({why}). Expected the columns "
            "audio (WAV bytes), digit and speaker. Download or write it again."
        ) from error
    return Arrays(spectrograms(recordings), labels)


def _read_tar(path: Path) -> Arrays:
    with tarfile.open(path, "r:") as tar:
        files = [(member.name, file.read()) for member in tar if (file := tar.extractfile(member)) is not None]
    digits, speakers, _ = zip(*(name.split("_") for name, _ in files), strict=True)
    labels = {"digit": list(digits), "speaker": list(speakers)}
    return Arrays(spectrograms([read_wave(data) for _, data in files]), labels)


def read_wave(data: bytes) -> Tensor:
    """Read the samples (T,) of a mono 16-bit WAV file, in [−1, 1]."""
    with wave.open(io.BytesIO(data)) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            raise ValueError(f"expected one channel of 16 bits at {RATE} Hz; got {file.getparams()}")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return torch.from_numpy(samples.astype(np.float32) / 32768)


def spectrograms(recordings: list[Tensor]) -> Tensor:
    """Compute log-mel spectrograms (N, 1, 40, 64); recordings are cropped or zero-padded around their center."""
    length = HOP * (FRAMES - 1)
    cut = torch.stack([_center(recording, length) for recording in recordings])
    window = torch.hann_window(WINDOW)
    found = []
    for part in cut.split(256):
        power = torch.stft(part, WINDOW, HOP, window=window, return_complex=True).abs().square()
        found.append((mel_filters() @ power).clamp(min=1e-6).log10())
    return torch.cat(found).unsqueeze(1)


def mel_filters() -> Tensor:
    """Return triangular filters (40, 129), evenly spaced on HTK's mel scale."""
    top = 2595 * log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, BANDS + 2) / 2595) - 1)
    hertz = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)


def _center(recording: Tensor, length: int) -> Tensor:
    if len(recording) > length:
        start = (len(recording) - length) // 2
        return recording[start : start + length]
    before = (length - len(recording)) // 2
    return torch.nn.functional.pad(recording, (before, length - len(recording) - before))
