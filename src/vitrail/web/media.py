"""What the page does with a sample of each modality: read it within limits, and make the image that it paints on."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from vitrail.data import Clip, InputSpec, Sound, Spectrogram, to_tensor
from vitrail.data.decode import decode_image
from vitrail.drawing.spectrogram import frequency_ticks, spectrogram_image, time_ticks
from vitrail.errors import MediaError
from vitrail.tokens import TokenLayout

NAME = "the upload"

PREVIEW = 1024
"""Longest side of the image that the page draws, in pixels."""

FRAME = 384
"""The same for one frame of a clip."""

CLIP_PIXELS = 5e9
"""Pixels of all frames of a clip; a small file can hold hours. About a minute and a half of Full HD."""


@dataclass(frozen=True)
class Medium:
    """Samples of one modality.

    Attributes:
        read: decodes the bytes of a file, or checks them where decoding depends on the model; raises ``ImageError``.
        batch: returns a sample as a batch of one for a model.
        draw: returns the image that the page paints on and its marks: the frames of a clip, one for each step of the
            patch grid, below each other with their ``times``; a spectrogram with ticks ``x`` and ``y``.
    """

    read: Callable[[bytes], Any]
    batch: Callable[[Any, InputSpec], Tensor]
    draw: Callable[[Any, InputSpec, TokenLayout], tuple[Image.Image, dict[str, Any]]]


def preview(sample: Any, spec: InputSpec, layout: TokenLayout) -> dict[str, Any]:
    """Return the image that the page paints on, as a JPEG in a URL, and its marks."""
    image, marks = MEDIA[spec.modality].draw(sample, spec, layout)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=92)
    return {"url": f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}", **marks}


def _batch(recording: Any, spec: InputSpec) -> Tensor:
    tensor: Tensor = recording.tensor(spec)
    return tensor[None]


def _draw_image(image: Image.Image, spec: InputSpec, layout: TokenLayout) -> tuple[Image.Image, dict[str, Any]]:
    small = image.copy()
    small.thumbnail((PREVIEW, PREVIEW), Image.Resampling.LANCZOS)
    return small, {}


def _read_clip(data: bytes) -> Clip:
    clip = Clip(data, NAME)
    width, height = clip.frame_size()
    frames = clip.timeline().count
    if frames * width * height > CLIP_PIXELS:
        raise MediaError(
            f"{NAME}: {frames} frames of {width} × {height} pixels are too many; expected at most "
            f"{CLIP_PIXELS / 1e9:.0f} gigapixels. Shorten the clip, or scale it down"
        )
    return clip


def _draw_clip(clip: Clip, spec: InputSpec, layout: TokenLayout) -> tuple[Image.Image, dict[str, Any]]:
    seen, steps = clip.seen(spec), layout.grid[0]
    shown = [seen[(2 * step + 1) * len(seen) // (2 * steps)] for step in range(steps)]
    scale = min(1.0, FRAME / max(shown[0][1].size))
    width, height = (max(1, round(side * scale)) for side in shown[0][1].size)
    sheet = Image.new("RGB", (width, height * steps))
    for step, (_, frame) in enumerate(shown):
        sheet.paste(frame.resize((width, height), Image.Resampling.LANCZOS), (0, step * height))
    return sheet, {"times": [round(time, 3) for time, _ in shown]}


def _read_sound(data: bytes) -> Sound:
    sound = Sound(data, NAME)
    sound.check()
    return sound


def _draw_sound(sound: Sound, spec: InputSpec, layout: TokenLayout) -> tuple[Image.Image, dict[str, Any]]:
    assert isinstance(spec.sampling, Spectrogram)
    bands, frames = spec.size
    image = spectrogram_image(sound.values(spec)[0], spec.sampling)
    wide = PREVIEW // frames + 1
    image = image.resize((frames * wide, round(frames * wide * 0.45)), Image.Resampling.NEAREST)
    return image, {"x": time_ticks(frames, spec.sampling), "y": frequency_ticks(bands, spec.sampling, 0.1)}


MEDIA = {
    "image": Medium(lambda data: decode_image(data, NAME), lambda image, spec: to_tensor([image], spec), _draw_image),
    "video": Medium(_read_clip, _batch, _draw_clip),
    "audio": Medium(_read_sound, _batch, _draw_sound),
}
"""By modality of the model's input."""
