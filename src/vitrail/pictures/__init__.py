"""Deprecated: ``vitrail.data`` and ``vitrail.drawing`` hold what was here."""

from vitrail._deprecation import renamed_attributes

_DATA = ("Batch", "Collection", "MAX_PIXELS", "Preprocessing", "Sample", "as_rgb", "open_collection", "samples")
_IMAGES = {"read_picture": "read_image", "check_picture": "check_image", "find_pictures": "find_images"}

__getattr__ = renamed_attributes(
    __name__,
    {
        **{name: f"vitrail.data:{name}" for name in (*_DATA, "to_tensor")},
        **{old: f"vitrail.data:{new}" for old, new in _IMAGES.items()},
        **{name: f"vitrail.drawing:{name}" for name in ("contact_sheet", "stained_glass")},
    },
)
