"""Deprecated: use ``vitrail.data`` and ``vitrail.drawing``."""

import warnings

from vitrail._deprecation import renamed_attributes

warnings.warn(
    "vitrail.pictures is deprecated and will be removed in 0.4; use vitrail.data and vitrail.drawing",
    DeprecationWarning,
    stacklevel=2,
)

_KEPT = ("Batch", "MAX_PIXELS", "Sample", "as_rgb", "samples", "to_tensor")
_RENAMED = {
    "Collection": "Dataset",
    "Preprocessing": "InputSpec",
    "check_picture": "check_image",
    "find_pictures": "find_images",
    "open_collection": "open_dataset",
    "read_picture": "read_image",
}

__getattr__ = renamed_attributes(
    __name__,
    {
        **{name: f"vitrail.data:{name}" for name in _KEPT},
        **{old: f"vitrail.data:{new}" for old, new in _RENAMED.items()},
        **{name: f"vitrail.drawing:{name}" for name in ("contact_sheet", "stained_glass")},
    },
)
