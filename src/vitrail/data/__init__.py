"""Data: open images from any source, decode, preprocess, load and augment them.

    open_dataset, Dataset           images or arrays with labels, masks and boxes, from any source
    Source, Arrays                  a source of your own; tensors as a source
    read_image, find_images         decode and find image files; every kind of bad file raises one clear error
    Clip, Sound                     video clips and sounds, decoded when they are read
    FrameSampling, Spectrogram      which frames of a clip a model sees, and the spectrogram of a sound
    check_image                     check a file, mostly by its header
    InputSpec, to_tensor            a model's input specification, and images as tensors made to it
    samples                         the sample images that come with the package

Names are resolved on first use: adapters need ``InputSpec`` alone and get it without Pillow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail._deprecation import renamed_attributes

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, open_dataset
    from vitrail.data.decode import MAX_PIXELS, as_rgb, check_image, find_images, read_image
    from vitrail.data.media.audio import Sound
    from vitrail.data.media.sampling import FrameSampling, Spectrogram
    from vitrail.data.media.video import Clip
    from vitrail.data.sample import Batch, Sample
    from vitrail.data.sample_files import samples
    from vitrail.data.sources import Arrays, Source
    from vitrail.data.spec import InputSpec, to_tensor

__all__ = [
    "MAX_PIXELS",
    "Arrays",
    "Batch",
    "Clip",
    "Dataset",
    "FrameSampling",
    "InputSpec",
    "Sample",
    "Sound",
    "Source",
    "Spectrogram",
    "as_rgb",
    "check_image",
    "find_images",
    "open_dataset",
    "read_image",
    "samples",
    "to_tensor",
]

_MODULES = {
    "media.audio": ("Sound",),
    "dataset": ("Dataset", "open_dataset"),
    "decode": ("MAX_PIXELS", "as_rgb", "check_image", "find_images", "read_image"),
    "sample": ("Batch", "Sample"),
    "sample_files": ("samples",),
    "media.sampling": ("FrameSampling", "Spectrogram"),
    "sources": ("Arrays", "Source"),
    "spec": ("InputSpec", "to_tensor"),
    "media.video": ("Clip",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

_renamed = renamed_attributes(
    __name__,
    {
        "Collection": "vitrail.data:Dataset",
        "Preprocessing": "vitrail.data:InputSpec",
        "open_collection": "vitrail.data:open_dataset",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _renamed(name)
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # a submodule that is imported under the same name later does not shadow it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
