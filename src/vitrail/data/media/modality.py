"""Modalities of models and data: what samples are called, the order of their axes, and how recordings are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.data.media.sampling import FrameSampling, Spectrogram


@dataclass(frozen=True)
class Modality:
    """One kind of input.

    Attributes:
        noun: what one sample is called.
        axes: order of the axes of one input: channels, time, height and width; frequency bands and time for audio.
        size: what the size of an input is given by, for messages.
        sampling: how a recording becomes an input: which frames of a clip, or the spectrogram of a sound. None for
            inputs that are read as they are.
    """

    noun: str
    axes: str
    size: str
    sampling: type[FrameSampling] | type[Spectrogram] | None = None

    @property
    def plural(self) -> str:
        """What several samples are called."""
        return f"{self.noun}s"


MODALITIES = {
    "image": Modality("image", "CHW", "a number of pixels, or (height, width)"),
    "video": Modality("video clip", "CTHW", "(time, height, width)", FrameSampling),
    "audio": Modality("sound", "CFT", "(bands, frames)", Spectrogram),
    "array": Modality("array", "", "one number for each axis"),
}
"""Modalities by name, as in `InputSpec.modality`."""
