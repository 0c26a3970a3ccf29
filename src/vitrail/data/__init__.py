"""Data: opening images from any source, decoding, preprocessing, loading and augmentation.

    read_image, find_images         decode image files; every kind of bad file raises one clear error
    check_image                     check that a file can be decoded, mostly from its header
    open_collection, Collection     many images with their labels: folders, class folders, parquet files
    Preprocessing, to_tensor        images as the tensors that a model expects
    samples                         the sample images that come with the package

Names are resolved on first use: adapters need ``Preprocessing`` alone and get it without Pillow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.data.collection import Collection, open_collection
    from vitrail.data.decode import MAX_PIXELS, as_rgb, check_image, find_images, read_image
    from vitrail.data.sample import Sample
    from vitrail.data.sample_images import samples
    from vitrail.data.spec import Batch, Preprocessing, to_tensor

__all__ = [
    "MAX_PIXELS",
    "Batch",
    "Collection",
    "Preprocessing",
    "Sample",
    "as_rgb",
    "check_image",
    "find_images",
    "open_collection",
    "read_image",
    "samples",
    "to_tensor",
]

_MODULES = {
    "MAX_PIXELS": "decode",
    "Batch": "spec",
    "Collection": "collection",
    "Preprocessing": "spec",
    "Sample": "sample",
    "as_rgb": "decode",
    "check_image": "decode",
    "find_images": "decode",
    "open_collection": "collection",
    "read_image": "decode",
    "samples": "sample_images",
    "to_tensor": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # a submodule that is imported under the same name later does not shadow it
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
