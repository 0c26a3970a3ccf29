"""Video clips: frames at chosen times, one decoded at a time, by PyAV (``pip install vitrail[video]``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import MAX_PIXELS, center_crop
from vitrail.data.media.recording import Recording, library, reason
from vitrail.data.media.sampling import FrameSampling
from vitrail.data.spec import InputSpec
from vitrail.errors import ImageError, MediaError

EXTENSIONS = frozenset({*(".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"), *(".gif",)})
"""File name extensions of clips. A GIF counts as an image unless the modality is video."""

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,avi,gif,matroska,webm,mpeg,mpegts,mpegvideo,ogg,asf,flv"
# Containers alone: FFmpeg reads playlists, too, which name other files.

SEEK_SECONDS = 10
"""Frames further apart are reached by a seek; closer ones by decoding what lies between."""

SEEN = 640
"""Longest side of the frames of `Clip.seen`, in pixels."""

CUT_OFF = 0.05
"""Share of a clip that may be missing against its header before it counts as cut off."""


@dataclass(frozen=True)
class Timeline:
    """When a clip's frames are shown.

    Attributes:
        count: number of frames.
        rate: frames per second, on average.
        start: time of the first frame, in units of ``unit`` seconds.
        unit: the stream's time base.
    """

    count: int
    rate: Fraction
    start: int
    unit: Fraction

    @property
    def seconds(self) -> float:
        """Length of the clip."""
        return float(self.count / self.rate)

    def within(self, index: int) -> int:
        """Return a time within the display of a frame, in units."""
        return self.start + int((index + Fraction(1, 2)) / self.rate / self.unit)


class Clip(Recording):
    """A video clip. Frames are decoded one at a time, so that memory does not grow with its length.

    Example:
        >>> clip = Clip("juggling.avi")  # doctest: +SKIP
        >>> clip.timeline().seconds, len(clip.frames([0, 10, 20]))  # doctest: +SKIP
        (8.008, 3)
    """

    modality = "video"
    noun = "video clip"

    def check(self) -> None:
        with self._stream() as (container, stream):
            self._timeline(container, stream)

    def timeline(self) -> Timeline:
        """Return number and times of the frames, from the header where it has them."""
        with self._stream() as (container, stream):
            return self._timeline(container, stream)

    def frame_size(self) -> tuple[int, int]:
        """Return width and height of the frames in pixels, from the header."""
        with self._stream() as (_, stream):
            return stream.codec_context.width, stream.codec_context.height

    def sampled(self, number: int, sampling: FrameSampling | None = None) -> list[Image.Image]:
        """Return a number of frames as images, chosen by a sampling."""
        timeline = self.timeline()
        return self.frames((sampling or FrameSampling()).choose(number, timeline.count, float(timeline.rate)))

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """Return the frames with these indices, which rise, as RGB images, upright."""
        return list(self._images(indices))

    def values(self, spec: InputSpec) -> Tensor:
        """Read frames (3, T, H, W) in uint8, the largest centered part of the model's aspect ratio, resized."""
        _, *size = spec.size
        indices, _ = self._chosen(spec)
        resized = [np.asarray(center_crop(image, (size[0], size[1]))) for image in self._images(indices)]
        return torch.from_numpy(np.stack(resized)).permute(3, 0, 1, 2).contiguous()

    def seen(self, spec: InputSpec) -> list[tuple[float, Image.Image]]:
        """Return the frames that a model sees, cropped as it sees them but at their own resolution, and their times.

        Times are in seconds. Frames larger than ``SEEN`` pixels are reduced.
        """
        _, height, width = spec.size
        indices, rate = self._chosen(spec)
        found = []
        for index, image in zip(indices, self._images(indices), strict=True):
            scale = min(image.width / width, image.height / height)
            scale = min(scale, SEEN / max(height, width))
            size = (max(round(height * scale), 1), max(round(width * scale), 1))
            found.append((index / rate, center_crop(image, size)))
        return found

    def _chosen(self, spec: InputSpec) -> tuple[list[int], float]:
        """Return the indices of the frames that a model sees, and the clip's frames per second."""
        assert isinstance(spec.sampling, FrameSampling)
        timeline = self.timeline()
        rate = float(timeline.rate)
        return spec.sampling.choose(spec.size[0], timeline.count, rate), rate

    def _images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield frames as they are decoded; a frame that is wanted several times is decoded once."""
        with self._stream() as (container, stream):
            timeline = self._timeline(container, stream)
            if any(not 0 <= index < timeline.count for index in indices):
                raise MediaError(f"{self.name}: no frame {max(indices)}; the clip has {timeline.count} frames")
            wanted = [timeline.within(index) for index in indices]
            for frame in self._at(container, stream, timeline, wanted):
                yield _upright(frame)

    def _at(self, container: Any, stream: Any, timeline: Timeline, wanted: Sequence[int]) -> Iterator[Any]:
        """Yield for each time the last frame that begins before it."""
        decoded = _Decoded(container, stream, timeline)
        for time in wanted:
            if (time - decoded.time) * timeline.unit > SEEK_SECONDS:
                decoded.seek(time)
            frame = decoded.until(time)
            missing = (time - decoded.time) * timeline.unit - 2 / timeline.rate
            if frame is None or (decoded.ended and missing > max(CUT_OFF * timeline.seconds, 0.5)):
                ends = float((decoded.time - timeline.start) * timeline.unit)
                raise MediaError(
                    f"{self.name}: the {self.noun} ends after {max(ends, 0):.1f} of {timeline.seconds:.1f} seconds: "
                    "it is damaged or cut off; fetch or export it again"
                )
            yield frame

    def _timeline(self, container: Any, stream: Any) -> Timeline:
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate or Fraction(25)
        count = stream.frames
        if not count and stream.duration:
            count = round(stream.duration * stream.time_base * rate)
        if not count:  # no header says: count the packets, without decoding them
            known, first, last = 0, None, 0
            for packet in container.demux(stream):
                count += bool(packet.size)
                if packet.size and packet.pts is not None:
                    known += 1
                    first = packet.pts if first is None else min(first, packet.pts)
                    last = max(last, packet.pts)
            if first is not None and known > 1 and last > first:
                rate = Fraction(known - 1) / ((last - first) * stream.time_base)
            container.seek(0)
        if not count:
            raise MediaError(f"{self.name}: the {self.noun} has no frames; export it again")
        return Timeline(count, rate, stream.start_time or 0, stream.time_base)

    @contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """Open the clip; every error inside becomes a ``MediaError``."""
        av = require()
        file = self.opened()
        try:
            with av.open(file, options={"format_whitelist": _FORMATS}) as container:
                if not container.streams.video:
                    raise MediaError(f"{self.name}: the file has no video track; expected a {self.noun}")
                stream = container.streams.video[0]
                width, height = stream.codec_context.width, stream.codec_context.height
                if width * height > MAX_PIXELS:
                    raise MediaError(
                        f"{self.name}: its frames are too large ({width} × {height}); expected at most "
                        f"{MAX_PIXELS / 1e6:.0f} megapixels. Scale the clip down"
                    )
                stream.thread_type = "AUTO"
                yield container, stream
        except ImageError:
            raise
        except Exception as error:  # FFmpeg's errors are of many kinds
            raise MediaError(
                f"{self.name}: not a {self.noun}, or it is damaged or cut off ({reason(error)}); expected mp4, avi, "
                "mov, mkv, webm or gif. Fetch or export it again"
            ) from error


class _Decoded:
    """The frames of a stream in order, from any time on.

    Attributes:
        time: when the current frame begins, in units; before the first one, the clip's start.
        ended: whether there are no further frames.
    """

    def __init__(self, container: Any, stream: Any, timeline: Timeline) -> None:
        self._container, self._stream, self._timeline = container, stream, timeline
        self._step = max(int(1 / timeline.rate / timeline.unit), 1)
        self._current: Any = None
        self._following: Any = None
        self.time = self._begins = timeline.start
        self.ended = False
        self._restart()

    def until(self, time: int) -> Any:
        """Decode up to the last frame that begins before a time, or the first one after it if there is none."""
        while not self.ended and (self._following is None or self._begins <= time):
            if self._following is not None:
                self._current, self.time = self._following, self._begins
            self._following = next(self._frames, None)
            if self._following is None:
                self.ended = True
            else:
                pts, earliest = self._following.pts, self._begins + self._step
                # Frames come in the order that they are shown; some files have wrong times.
                self._begins = earliest if pts is None or pts <= self._begins else pts
        return self._following if self._current is None else self._current

    def seek(self, time: int) -> None:
        """Continue at the key frame before a time; from the beginning where the file cannot be searched."""
        self._container.seek(time, stream=self._stream, backward=True)
        self._restart()
        self._following = next(self._frames, None)
        pts = None if self._following is None else self._following.pts
        if pts is None or pts > time:
            self._container.seek(0)
            self._restart()
        else:
            self._begins = pts

    def _restart(self) -> None:
        self._frames = iter(self._container.decode(self._stream))
        self._current = self._following = None
        self.time = self._timeline.start
        self._begins = self._timeline.start - self._step
        self.ended = False


def require() -> Any:
    """Import PyAV, or raise with the extra that installs it."""
    return library("av", "reading video", "video", "PyAV")


def _upright(frame: Any) -> Image.Image:
    """Return a decoded frame as an RGB image, turned as its metadata says (phones record lying down)."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turned = getattr(frame, "rotation", 0) % 360
    return image.rotate(turned, expand=True) if turned else image
