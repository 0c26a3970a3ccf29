"""How a model samples media: which frames of a clip, and the spectrogram of a sound.

Plain values that are saved with a model, so that every command reads clips and sounds as training did.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail._checks import check, check_choice, check_int, is_number

Frames = Literal["uniform", "segments", "rate"]
Mel = Literal["htk", "slaney", "kaldi"]
Logarithm = Literal["log10", "ln"]

SLANEY_BREAK, SLANEY_STEP = 1000.0, 200 / 3
"""Slaney's mel scale is linear up to 1000 Hz, 200/3 Hz for each mel, and logarithmic above."""


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a clip a model sees.

    Attributes:
        frames: ``uniform``: evenly spaced from the first to the last frame. ``segments``: the middle frame of as many
            equal segments (TSN, Wang et al., 2016). ``rate``: frames at a ``rate`` per second from the middle of
            the clip; a clip that is too short repeats its first and last frame.
        rate: frames per second for ``rate``.

    Example:
        >>> FrameSampling("uniform").choose(3, 101, 25.0)
        [0, 50, 100]
    """

    frames: Frames = "uniform"
    rate: float | None = None

    def __post_init__(self) -> None:
        check_choice("frames", self.frames, get_args(Frames))
        right = (self.rate is not None) == (self.frames == "rate")
        right = right and (self.rate is None or (is_number(self.rate) and self.rate > 0))
        check("rate", self.rate, right, "frames per second, above 0, with frames='rate'; none otherwise")

    def choose(self, number: int, count: int, frame_rate: float) -> list[int]:
        """Return the indices of ``number`` frames of a clip of ``count`` frames, in rising order."""
        check_int("number", number)
        check_int("count", count)
        last = count - 1
        if self.frames == "segments":
            return [(2 * index + 1) * count // (2 * number) for index in range(number)]
        step = last / max(number - 1, 1) if self.rate is None else frame_rate / self.rate
        start = 0.0 if self.rate is None and number > 1 else (last - (number - 1) * step * (number > 1)) / 2
        return [min(max(round(start + index * step), 0), last) for index in range(number)]


@dataclass(frozen=True)
class Spectrogram:
    """How the log-mel spectrogram of a sound is computed: resampled, short-time power spectrum, mel bands, logarithm.

    The defaults suit speech and everyday sounds. Channels are averaged, and sounds of another rate are resampled. The
    model's input size says how many bands and frames there are: a longer sound is cropped, a shorter one padded with
    silence.

    Attributes:
        rate: samples per second that sounds are resampled to.
        window, hop: length of a window, and from one to the next, in seconds.
        low, high: lowest and highest frequency of the bands in hertz; by default up to half the rate.
        mel: mel scale: ``htk``; ``slaney``, with bands of equal area; ``kaldi``, triangular on the mel scale.
        log, floor: the logarithm, and the least power it is taken of.
        place: where sounds are cropped and padded: around their ``center``, or from their ``start``.
        preemphasis: coefficient of the filter that raises high frequencies in each window; 0 for none.
        whole: whether only whole windows count, each without its mean, as in Kaldi. Else the first window is
            centered at the start of the sound.
        pad: value of missing frames with ``whole``.
    """

    rate: int = 16000
    window: float = 0.025
    hop: float = 0.010
    low: float = 20.0
    high: float | None = None
    mel: Mel = "htk"
    log: Logarithm = "log10"
    floor: float = 1e-6
    place: Literal["center", "start"] = "center"
    preemphasis: float = 0.0
    whole: bool = False
    pad: float = 0.0

    def __post_init__(self) -> None:
        check_int("rate", self.rate)
        for name in ("window", "hop"):
            value = getattr(self, name)
            right = is_number(value) and value > 0 and round(value * self.rate) >= 1
            check(name, value, right, f"seconds, at least one sample at {self.rate} samples/s")
        top = self.rate / 2
        high = top if self.high is None else self.high
        right = is_number(self.low) and is_number(high) and 0 <= self.low < high <= top
        check("low, high", (self.low, self.high), right, f"frequencies in hertz, from 0 up to {top:g}, in this order")
        check_choice("mel", self.mel, get_args(Mel))
        check_choice("log", self.log, get_args(Logarithm))
        check("floor", self.floor, is_number(self.floor) and self.floor > 0, "a power above 0")
        check_choice("place", self.place, ("center", "start"))
        right = is_number(self.preemphasis) and 0 <= self.preemphasis < 1
        check("preemphasis", self.preemphasis, right, "a number from 0, below 1")
        check("whole", self.whole, isinstance(self.whole, bool), "True or False")

    @classmethod
    def kaldi(cls, rate: int = 16000) -> Spectrogram:
        """Return Kaldi's filter banks as the Audio Spectrogram Transformer uses them."""
        own = {"place": "start", "preemphasis": 0.97, "whole": True, "floor": 1.192092955078125e-07}
        return cls(rate, mel="kaldi", log="ln", **own)  # type: ignore[arg-type]

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return round(self.window * self.rate)

    @property
    def hop_samples(self) -> int:
        """Samples from one window to the next."""
        return round(self.hop * self.rate)

    @property
    def fft(self) -> int:
        """Length of the Fourier transform: the next power of two."""
        return 1 << (self.window_samples - 1).bit_length()

    def band_of(self, hertz: float, bands: int) -> float:
        """Return which of some bands a frequency is the center of, from 0; between bands a fraction."""
        low, high, at = _to_mel(
            torch.tensor([self.low, self.high or self.rate / 2, hertz], dtype=torch.float64), self.mel
        ).tolist()
        return float((at - low) / (high - low) * (bands + 1) - 1)

    def samples(self, frames: int) -> int:
        """Return how many samples a spectrogram of this many frames shows."""
        return (frames - 1) * self.hop_samples + (self.window_samples if self.whole else 1)

    def frames(self, seconds: float) -> int:
        """Return how many frames show a whole sound of this length."""
        count = ceil(seconds * self.rate)
        if self.whole:
            return max((count - self.window_samples) // self.hop_samples + 1, 1)
        return max(ceil((count - 1) / self.hop_samples) + 1, 1)

    def compute(self, sound: Tensor, bands: int, frames: int) -> Tensor:
        """Compute the spectrogram (1, bands, frames) of a mono sound (n,) at this rate; the lowest band is first."""
        sound = self._fitted(sound.float(), self.samples(frames))
        if not self.whole:
            sound = torch.nn.functional.pad(sound, (self.window_samples // 2,) * 2)
        size, hop = self.window_samples, self.hop_samples
        windows = sound.unfold(0, size, hop)[:frames] if len(sound) >= size else sound.new_zeros(0, size)
        if self.whole:
            windows = windows - windows.mean(1, keepdim=True)
        if self.preemphasis:
            before = torch.cat([windows[:, :1], windows[:, :-1]], 1)
            windows = windows - self.preemphasis * before
        windows = windows * torch.hann_window(size, periodic=not self.whole)
        power = torch.fft.rfft(windows, self.fft).abs().square()
        filters = mel_filters(bands, self.fft, self.rate, self.low, self.high or self.rate / 2, self.mel)
        bands_TF = (power @ filters.T).clamp(min=self.floor)
        values = (bands_TF.log10() if self.log == "log10" else bands_TF.log()).T
        return torch.nn.functional.pad(values, (0, frames - values.shape[1]), value=self.pad)[None]

    def _fitted(self, sound: Tensor, length: int) -> Tensor:
        """Crop a sound; pad it with silence unless only whole windows count."""
        start = 0 if self.place == "start" else (len(sound) - length) // 2
        if start > 0:
            sound = sound[start:]
        sound, missing = sound[:length], length - len(sound)
        if missing <= 0 or self.whole:
            return sound
        before = 0 if self.place == "start" else missing // 2
        return torch.nn.functional.pad(sound, (before, missing - before))


@lru_cache(maxsize=16)
def mel_filters(bands: int, fft: int, rate: int, low: float, high: float, mel: Mel = "htk") -> Tensor:
    """Return triangular filters (bands, fft // 2 + 1), evenly spaced on a mel scale."""
    check_int("bands", bands)
    ends = _to_mel(torch.tensor([low, high], dtype=torch.float64), mel)
    edges = torch.linspace(float(ends[0]), float(ends[1]), bands + 2, dtype=torch.float64)
    hertz = torch.linspace(0, rate / 2, fft // 2 + 1, dtype=torch.float64)
    places = _to_mel(hertz, mel)
    if mel != "kaldi":  # triangles over frequencies, not over mels
        edges, places = _to_hertz(edges, mel), hertz
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = torch.minimum((places - left) / (middle - left), (right - places) / (right - middle)).clamp(min=0)
    if mel == "slaney":
        filters = filters * (2 / (right - left))
    return filters.float()


def _to_mel(hertz: Tensor, mel: Mel) -> Tensor:
    if mel == "slaney":
        above = 27 * (hertz.clamp(min=SLANEY_BREAK) / SLANEY_BREAK).log() / torch.tensor(6.4).double().log()
        return hertz.clamp(max=SLANEY_BREAK) / SLANEY_STEP + above
    return 1127 * (1 + hertz / 700).log()


def _to_hertz(mels: Tensor, mel: Mel) -> Tensor:
    if mel == "slaney":
        top = SLANEY_BREAK / SLANEY_STEP
        above = ((mels - top).clamp(min=0) * torch.tensor(6.4).double().log() / 27).exp()
        return mels.clamp(max=top) * SLANEY_STEP * above
    return 700 * ((mels / 1127).exp() - 1)
