"""timm: the library, and one file per family of its models."""

from vitrail.adapters.timm.library import LIBRARY

__all__ = ["LIBRARY"]
