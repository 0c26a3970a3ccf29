"""Pictures in, pictures out: reading, preparing for a model, and the stained-glass picture.

    read_picture, find_pictures     files to RGB pictures, every kind of bad file to one clear error
    check_picture                   whether a file can be read, mostly from its header
    open_collection, Collection     many pictures with what is known about them: folders, class folders, parquet files
    Preprocessing, to_tensor        pictures to what a model expects, the whole picture under the patch grid
    stained_glass                   a picture and its groups to the stained-glass picture
    contact_sheet                   several pictures side by side, with captions
    samples                         the sample pictures that come with the package

The names are resolved when they are first used: adapters need ``Preprocessing`` alone, and get it without
Pillow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.pictures.collection import Collection, open_collection
    from vitrail.pictures.glass import stained_glass
    from vitrail.pictures.preprocessing import Batch, Preprocessing, to_tensor
    from vitrail.pictures.reading import MAX_PIXELS, as_rgb, check_picture, find_pictures, read_picture
    from vitrail.pictures.sample import Sample
    from vitrail.pictures.sheet import contact_sheet
    from vitrail.pictures.shipped import samples

__all__ = [
    "MAX_PIXELS",
    "Batch",
    "Collection",
    "Preprocessing",
    "Sample",
    "as_rgb",
    "check_picture",
    "contact_sheet",
    "find_pictures",
    "open_collection",
    "read_picture",
    "samples",
    "stained_glass",
    "to_tensor",
]

_HOMES = {
    "MAX_PIXELS": "reading",
    "Batch": "preprocessing",
    "Collection": "collection",
    "Preprocessing": "preprocessing",
    "Sample": "sample",
    "as_rgb": "reading",
    "check_picture": "reading",
    "contact_sheet": "sheet",
    "find_pictures": "reading",
    "open_collection": "collection",
    "read_picture": "reading",
    "samples": "shipped",
    "stained_glass": "glass",
    "to_tensor": "preprocessing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
